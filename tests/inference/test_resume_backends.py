"""A run resumes on the backend that it was started on, or stops with the reason."""

import pytest
import torch

import credibly as cr
from credibly.backends.cpp import in_use
from credibly.core import compilation
from inference.stopped_runs import StoppedRuns, begin, crashes, density, make, manifest_of, quick, same, sg

pytestmark = pytest.mark.skipif(in_use.load_library() is None, reason="needs the C++ library")

METHODS = [quick(compile="auto", draws=8), sg(cr.SGHMC, compile="auto", draws=60)]


def without(monkeypatch):
    """Take the C++ library away, as on a machine without a compiler."""
    monkeypatch.setattr(in_use, "load_library", lambda: None)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
class TestLibrary(StoppedRuns):
    def test_lost_before_a_resume(self, tmp_path, tight, monkeypatch, method):
        known = method.fit(make(), seed=1)
        begin(method, make(), tmp_path / "run", crashes(monkeypatch), 4)
        assert manifest_of(tmp_path / "run")["backend"] == {
            "name": "cpp", "compiled": False, "library": True, "compiler": True
        }  # fmt: skip
        for reason in ("it could not be loaded or compiled", "CREDIBLY_NATIVE=0 switches it off"):
            with monkeypatch.context() as patch:
                without(patch)
                if "CREDIBLY" in reason:
                    patch.setenv("CREDIBLY_NATIVE", "0")
                with pytest.raises(cr.StoreError) as found:
                    cr.resume(tmp_path / "run", make(seed=5))
            assert f"was started with the C++ library and would continue with torch alone ({reason})" in str(
                found.value
            )
        same(cr.resume(tmp_path / "run", make(seed=5)), known)

    def test_found_before_a_resume(self, tmp_path, tight, monkeypatch, method):
        with monkeypatch.context() as patch:
            without(patch)
            known = method.fit(make(), seed=1)
            begin(method, make(), tmp_path / "run", crashes(patch), 4)
        with_library = method.fit(make(), seed=1)
        assert not torch.equal(with_library.draws, known.draws)
        assert manifest_of(tmp_path / "run")["backend"]["name"] == "torch"
        same(cr.resume(tmp_path / "run", make(seed=5)), known)
        # Only that run was without it.
        assert torch.equal(method.fit(make(), seed=1).draws, with_library.draws)


class TestCompiler(StoppedRuns):
    """A density is for torch alone; its steps count as compiled wherever torch.compile is called."""

    @pytest.fixture
    def compile(self, monkeypatch):
        """Stand in for torch.compile, which takes seconds."""
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def lose(self, monkeypatch):
        monkeypatch.setattr(compilation.shutil, "which", lambda name: None)

    def test_lost_before_a_resume(self, tmp_path, tight, monkeypatch, compile):
        method = quick(compile=True)
        begin(method, density(), tmp_path / "run", crashes(monkeypatch), 3)
        assert manifest_of(tmp_path / "run")["backend"]["compiled"]
        with monkeypatch.context() as patch:
            self.lose(patch)
            with pytest.raises(cr.StoreError, match=r"compiled steps and would continue without \(no C\+\+ compiler"):
                cr.resume(tmp_path / "run", density())
        cr.resume(tmp_path / "run", density())

    def test_found_before_a_resume(self, tmp_path, tight, monkeypatch, compile):
        method = quick(compile=True)
        with monkeypatch.context() as patch:
            self.lose(patch)
            known = method.fit(density(), seed=1)
            begin(method, density(), tmp_path / "run", crashes(patch), 3)
        found = cr.resume(tmp_path / "run", density())
        assert not found.record.history["compiled"]
        same(found, known)
