"""GPU code on disk: compiled once, checked when it is read, and never a reason to fail."""

import os

import pytest

from credibly.backends.cuda import driver
from credibly.backends.cuda.code_cache import HEADER, cache_folder, cached_code

PARTS = ("__global__ void f() {}", "--gpu-architecture=sm_90", "nvrtc 13.0")


class Compiler:
    def __init__(self, code=b"machine code"):
        self.code, self.calls = code, 0

    def __call__(self):
        self.calls += 1
        return self.code


def test_code_is_compiled_once(tmp_path):
    compiler = Compiler()
    assert [cached_code(PARTS, compiler, tmp_path / "cache") for _ in range(3)] == [b"machine code"] * 3
    assert compiler.calls == 1
    (path,) = (tmp_path / "cache").iterdir()
    assert path.read_bytes().endswith(b"machine code")


@pytest.mark.parametrize("position", range(len(PARTS)))
def test_every_part_of_the_key_counts(tmp_path, position):
    cached_code(PARTS, Compiler(b"old"), tmp_path)
    changed = tuple(part + "1" if k == position else part for k, part in enumerate(PARTS))
    assert cached_code(changed, Compiler(b"new"), tmp_path) == b"new"


def test_parts_do_not_run_into_each_other(tmp_path):
    cached_code(("ab", "c"), Compiler(b"old"), tmp_path)
    assert cached_code(("a", "bc"), Compiler(b"new"), tmp_path) == b"new"


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "flipped", "longer"])
def test_damaged_code_is_compiled_again(tmp_path, damage):
    cached_code(PARTS, Compiler(), tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    forms = {"empty": b"", "cut": content[:-3], "header": HEADER[:5], "flipped": flipped, "longer": content + b"x"}
    path.write_bytes(forms[damage])
    compiler = Compiler()
    assert [cached_code(PARTS, compiler, tmp_path) for _ in range(2)] == [b"machine code"] * 2
    assert compiler.calls == 1
    assert path.read_bytes() == content


def test_a_compiler_that_fails_leaves_nothing(tmp_path):
    def fails():
        raise driver.CudaError("no")

    with pytest.raises(driver.CudaError):
        cached_code(PARTS, fails, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path):
    tmp_path.chmod(0o777)
    compiler = Compiler()
    assert [cached_code(PARTS, compiler, tmp_path) for _ in range(2)] == [b"machine code"] * 2
    assert compiler.calls == 2
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder_is_no_reason_to_fail(tmp_path):
    (tmp_path / "file").write_text("")
    assert cached_code(PARTS, Compiler(), tmp_path / "file" / "cache") == b"machine code"


def test_a_full_disk_is_no_reason_to_fail(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cached_code(PARTS, Compiler(), tmp_path) == b"machine code"
    assert not list(tmp_path.iterdir())


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDIBLY_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given"
    monkeypatch.delenv("CREDIBLY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "credibly"

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", no_home)
    assert cache_folder() is None


def test_kernels_are_keyed_by_source_architecture_and_compiler(tmp_path, monkeypatch):
    compiled = []

    class Nvrtc:
        minor = 0

        def nvrtcVersion(self, major, minor):
            major._obj.value, minor._obj.value = 13, self.minor
            return 0

    nvrtc = Nvrtc()
    monkeypatch.setenv("CREDIBLY_CACHE", str(tmp_path))
    monkeypatch.setattr(driver, "_compiler", lambda: nvrtc)
    monkeypatch.setattr(driver, "_compile", lambda source, flags: compiled.append((source, flags[0])) or b"code")
    for _ in range(2):
        driver.compile_kernel("a", (9, 0))
        driver.compile_kernel("b", (9, 0))
        driver.compile_kernel("a", (10, 0))
    assert compiled == [(s, f"--gpu-architecture=sm_{n}") for s, n in (("a", 90), ("b", 90), ("a", 100))]
    nvrtc.minor = 1
    driver.compile_kernel("a", (9, 0))
    assert len(compiled) == 4
