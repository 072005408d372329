"""The compiled library: built with the package, checked before it is loaded, and optional."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import mlp, randn
from credibly.backends.cpp import api, build
from credibly.backends.cpp.library import FOLDER, Unusable, load, loaded
from credibly.errors import InputError
from credibly.inference.target import ProblemTarget
from warm_python import warm_python

OFF = os.environ.get("CREDIBLY_NATIVE") == "0"
HAS_COMPILER = not OFF and any(shutil.which(name) for name in ("g++", "c++", "clang++"))
compiled = pytest.mark.skipif(not HAS_COMPILER, reason="CREDIBLY_NATIVE is 0" if OFF else "there is no C++ compiler")


def test_is_there_wherever_a_compiler_is():
    # Tests of the C++ backend skip without the library: this one does not.
    assert (loaded() is not None) == HAS_COMPILER


CODE = """
from credibly.backends.cpp.library import loaded
print("variant", getattr(loaded(), "variant", None))
"""


def variant_of_a_process(folder, **environment):
    clean = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [warm_python(), "-c", CODE],
        capture_output=True,
        text=True,
        env={**clean, "HOME": str(folder), "TMPDIR": str(folder), **environment},
    )
    assert not list(folder.iterdir())  # nothing is compiled, and nothing is left behind
    assert not done.returncode, done.stderr
    return done.stdout.split()[-1], done.stderr


@compiled
class TestProcess:
    def test_needs_no_compiler(self, tmp_path):
        assert variant_of_a_process(tmp_path, PATH=str(tmp_path), CXX="") == (loaded().variant, "")

    def test_can_be_switched_off(self, tmp_path):
        assert variant_of_a_process(tmp_path, CREDIBLY_NATIVE="0") == ("None", "")

    def test_can_be_told_which_variant(self, tmp_path):
        assert variant_of_a_process(tmp_path, CREDIBLY_NATIVE=loaded().variant) == (loaded().variant, "")


@pytest.fixture
def fresh():
    """Have `loaded` look again, in the test and after it."""
    before = loaded()
    loaded.cache_clear()
    yield before
    loaded.cache_clear()


def test_rejects_an_unknown_variant(monkeypatch, fresh):
    monkeypatch.setenv("CREDIBLY_NATIVE", "sse9")
    with pytest.raises(InputError, match=r"CREDIBLY_NATIVE must be 0, 1 or one of baseline.*, got 'sse9'"):
        loaded()


@compiled
class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path):
        return shutil.copytree(FOLDER, tmp_path / "compiled")

    def test_an_intact_copy_is_loaded(self, folder):
        assert load(folder, loaded().variant).sha256 == loaded().sha256

    @pytest.mark.parametrize("kept", [0, 4096, -1])
    @pytest.mark.parametrize("name", [build.PROBE, "variant"])
    def test_a_file_that_was_cut_short_is_refused(self, folder, name, kept):
        path = folder / f"{loaded().variant if name == 'variant' else name}.so"
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(Unusable, match=r"\.so is missing or damaged \(its checksum differs\)"):
            load(folder, loaded().variant)

    def test_a_flipped_bit_is_refused(self, folder):
        path = folder / f"{loaded().variant}.so"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(Unusable, match="damaged"):
            load(folder, loaded().variant)

    def test_a_missing_file_is_refused(self, folder):
        (folder / f"{loaded().variant}.so").unlink()
        with pytest.raises(Unusable, match="missing"):
            load(folder, loaded().variant)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 1, "sources": ""}', "\udcff"])
    def test_a_damaged_manifest_is_refused(self, folder, text):
        (folder / build.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(Unusable, match="manifest is damaged"):
            load(folder, loaded().variant)

    def test_a_library_of_other_sources_is_refused(self, folder):
        path = folder / build.MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), "sources": "0" * 64}))
        with pytest.raises(Unusable, match="other sources"):
            load(folder, loaded().variant)

    def test_a_processor_without_the_instructions_does_not_load_them(self, folder, monkeypatch):
        monkeypatch.setattr("credibly.backends.cpp.library.cpu_level", lambda path: -1)
        with pytest.raises(Unusable, match="install credibly again on this machine"):
            load(folder)

    def test_is_reported_once_and_torch_is_used(self, folder, monkeypatch, fresh, caplog):
        (folder / f"{fresh.variant}.so").write_bytes(b"")
        monkeypatch.setattr("credibly.backends.cpp.library.FOLDER", folder)
        assert loaded() is None
        assert loaded() is None
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "damaged" in record.getMessage()
        net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        given = cr.Problem(
            net, (torch.zeros(5, 3), torch.zeros(5)), cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0)
        )
        assert not ProblemTarget(given).select_backend("auto").fused


class TestBuild:
    def test_without_a_compiler_the_reason_is_kept(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("CXX", "no-such-compiler")
        build.build(tmp_path)
        assert "no C++ compiler was found (looked for no-such-compiler)" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [build.MANIFEST]
        with pytest.raises(Unusable, match="looked for no-such-compiler.*install a C\\+\\+ compiler"):
            load(tmp_path)

    def test_a_compiler_that_fails_leaves_nothing(self, tmp_path, monkeypatch):
        false = tmp_path / "false"
        false.write_text("#!/bin/sh\n[ $1 = --version ] && echo v1 && exit\necho 'x.cpp: error: no' >&2\nexit 3\n")
        false.chmod(0o755)
        monkeypatch.setenv("CXX", str(false))
        build.build(tmp_path / "compiled")
        assert [path.name for path in (tmp_path / "compiled").iterdir()] == [build.MANIFEST]
        with pytest.raises(Unusable, match="failed with status 3: x.cpp: error: no"):
            load(tmp_path / "compiled")

    def test_rejects_unknown_variants(self, tmp_path, capsys):
        build.build(tmp_path, "sse9")
        assert not HAS_COMPILER or "CREDIBLY_VARIANTS=sse9 is not available" in capsys.readouterr().err

    @compiled
    def test_is_reproducible(self, tmp_path, monkeypatch):
        monkeypatch.setattr(build, "UNITS", ("moments",))
        manifests = []
        for name in ("one", "a-longer-name"):
            (tmp_path / name / "tmp").mkdir(parents=True)
            monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name / "tmp"))
            build.build(tmp_path / name)
            manifests.append((tmp_path / name / build.MANIFEST).read_bytes())
            assert not list((tmp_path / name / "tmp").iterdir())
        assert manifests[0] == manifests[1]

    def test_imports_the_standard_library_alone(self):
        # setup.py runs it where torch is not installed.
        code = "import sys; sys.path.insert(0, sys.argv[1]); import build; print(len(build.source_hash()))"
        command = [sys.executable, "-IS", "-c", code, str(build.SOURCES)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "64\n"


@compiled
@pytest.mark.parametrize("variant", build.variants())
def test_every_variant_computes_the_same_density(variant, monkeypatch, fresh):
    """Against torch in float64, for the variants that were compiled (CREDIBLY_VARIANTS=all compiles all)."""
    try:
        functions = load(FOLDER, variant).functions
    except Unusable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(api, "library", lambda: functions)
    x, y = randn(70, 3, dtype=torch.float64), randn(70, 2, seed=1, dtype=torch.float64)
    net = mlp(3, 13, 5, 2, dtype=torch.float64)
    given = cr.Problem(net, (x, y), cr.likelihoods.Gaussian(0.7), cr.priors.Normal(1.3))
    theta = 0.3 * randn(4, given.layout.dim, seed=2, dtype=torch.float64)
    fast = ProblemTarget(given)
    assert fast.select_backend("auto").fused
    found, expected = fast.likelihood_and_grad(theta), ProblemTarget(given).likelihood_and_grad(theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
