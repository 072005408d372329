"""JSON from an untrusted folder: the work and the memory to refuse it grow with its size, not faster."""

import tracemalloc

import pytest

from credibly.storage.json_files import MOST_BYTES, MOST_LEVELS, FileProblem, read_json


def refusal(path, text):
    path.write_text(text)
    with pytest.raises(FileProblem) as found:
        read_json(path)
    return str(found.value)


def test_escapes_without_an_end_are_searched_once(tmp_path):
    """Two minutes where every escaped quote starts a search to the end of the text."""
    assert "Unterminated string" in refusal(tmp_path / "manifest.json", '"' + '\\"' * 100_000)


def test_the_memory_for_a_long_string_is_a_few_times_its_size(tmp_path):
    text = '"' + "a" * (MOST_BYTES - 1)
    tracemalloc.start()
    try:
        refusal(tmp_path / "table.json", text)
        assert tracemalloc.get_traced_memory()[1] < 6 * MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ['"[[[]\\"[["', '{"a\\\\": ["[", "\\"{", 1]}', "[" * MOST_LEVELS + "]" * MOST_LEVELS])
def test_brackets_inside_strings_are_no_levels(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    read_json(tmp_path / "a.json")


@pytest.mark.parametrize("start", ["", '["a\\\\", ', '["\\"[", '])
def test_deep_lists_are_refused(tmp_path, start):
    assert f"more than {MOST_LEVELS} levels" in refusal(tmp_path / "a.json", start + "[" * (MOST_LEVELS + 1))
