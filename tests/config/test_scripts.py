"""Scripts run where the path of their Python has a space."""

import shutil
import subprocess
import sys
from pathlib import Path

from clap_ds.config.scripts import mend_scripts


def test_a_script_whose_python_has_a_space_in_its_path_runs(tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    texts = {
        "theirs": f"#!{folder}/python\nimport sys\nprint(sys.argv[1:])\n",
        "shell": '#!/bin/sh\necho "$@"\n',
        "environment": "#!/usr/bin/env python3\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    shutil.copy(sys.executable, folder / "binary")
    assert mend_scripts(folder) == [folder / "theirs"]
    assert mend_scripts(folder) == []
    assert {(folder / name).read_text() for name in ("shell", "environment")} == {texts["shell"], texts["environment"]}
    done = subprocess.run([folder / "theirs", "a b", "c"], capture_output=True, text=True)
    assert done.stdout == "['a b', 'c']\n", done.stderr
