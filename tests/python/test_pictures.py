"""The pictures of docs/concepts.md are what their script draws."""

import shutil
import subprocess
import sys
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_pictures_are_those_of_their_script(tmp_path):
    script = shutil.copy(IMAGES / "concepts.py", tmp_path)
    subprocess.run([sys.executable, script], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {name: (IMAGES / name).read_text() for name in drawn}
    page = (IMAGES.parent / "concepts.md").read_text()
    assert sorted(drawn) == sorted(
        line.split("images/")[1][:-1] for line in page.splitlines() if "](images/" in line
    )
