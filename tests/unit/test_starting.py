import gc
import subprocess
import sys
from pathlib import Path

import pytest
from rushes_core.starting import importing


def test_the_collector_stays_away_from_what_is_imported_and_comes_back():
    with importing():
        assert not gc.isenabled()
        kept = [[]]
    assert gc.isenabled()
    assert not any(found is kept for found in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_module_gets_the_arguments_and_its_status_is_that_of_the_process(tmp_path: Path):
    (tmp_path / "part.py").write_text(
        "import gc\nassert not gc.isenabled()\ndef main(words):\n    print(words, gc.isenabled())\n    return 7\n"
    )
    command = [sys.executable, "-m", "rushes_core.starting", "part", "one", "two"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (7, "['one', 'two'] True\n"), ended.stderr
