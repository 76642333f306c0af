"""Print the requirements of some of the package's extras, to install them before the package itself."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
for extra in sys.argv[1:]:
    for requirement in project["optional-dependencies"][extra]:
        if not requirement.startswith(project["name"]):
            print(requirement)
