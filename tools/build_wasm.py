"""Compile the C++ core to WebAssembly for the playground's static page.

    python tools/build_wasm.py            # writes src/credibly/web/playground/static/wasm/credibly.wasm and its SHA-256
    python tools/build_wasm.py --out DIR  # writes them there instead

Needs clang and lld with the WASI libraries, on Debian: apt-get install clang lld wasi-libc libclang-rt-dev-wasm32
libc++-dev-wasm32. One version of these packages gives the same bytes in any folder; other versions give other bytes,
and `tests/backends/test_wasm.py` compares the results.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ROOT / "src" / "credibly" / "backends"
TARGET = ROOT / "src" / "credibly" / "web" / "playground" / "static" / "wasm"
NAME = "credibly.wasm"

# The library's own sources, and what the page needs around them, where small is better than fast.
SOURCES = {"cpp/mlp_f32.cpp": "-O2", "cpp/moments.cpp": "-O2", "wasm/exports.cpp": "-Os", "wasm/runtime.cpp": "-Os"}
# No fused multiply-add in WebAssembly, so nothing to contract. Exceptions become traps.
FLAGS = (
    "--target=wasm32-wasi",
    "-msimd128",
    "-std=c++17",
    "-fno-math-errno",
    "-fignore-exceptions",
    "-D_LIBCPP_NO_EXCEPTIONS",
    "-fno-rtti",
    "-ffunction-sections",
    "-fvisibility=hidden",
)
LINK = ("--target=wasm32-wasi", "-mexec-model=reactor", "-Wl,--gc-sections,--strip-all,-O2")
COMPILER = "clang++"


def missing() -> str:
    """Return what the build lacks on this machine, empty if nothing."""
    for program in (COMPILER, "wasm-ld"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    found = subprocess.run(
        [COMPILER, *FLAGS, "-x", "c++", "-fsyntax-only", "-"],
        input="#include <vector>\n",
        capture_output=True,
        text=True,
    )
    return "" if found.returncode == 0 else "the C++ library for wasm32-wasi is not installed"


def build(folder: Path) -> Path:
    """Compile and link the module into a folder, and write its SHA-256 next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    with tempfile.TemporaryDirectory(prefix="credibly-wasm-") as work:
        objects = []
        for source, level in SOURCES.items():
            objects.append(f"{work}/{Path(source).stem}.o")
            # In the folder of the sources: no path of this machine gets into the module.
            subprocess.run([COMPILER, *FLAGS, level, "-c", "-o", objects[-1], source], cwd=BACKENDS, check=True)
        subprocess.run([COMPILER, *LINK, "-o", f"{work}/{NAME}", *objects], check=True)
        target.write_bytes(Path(work, NAME).read_bytes())
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    (folder / f"{NAME}.sha256").write_text(f"{digest}  {NAME}\n")
    return target


def main() -> None:
    """Build the module and print its size."""
    parser = argparse.ArgumentParser(description="Compile the C++ core to WebAssembly.")
    parser.add_argument("--out", type=Path, default=TARGET, help="folder to write to")
    lack = missing()
    if lack:
        raise SystemExit(
            f"{lack}. On Debian: apt-get install clang lld wasi-libc libclang-rt-dev-wasm32 libc++-dev-wasm32"
        )
    built = build(parser.parse_args().out)
    print(f"{built}: {built.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
