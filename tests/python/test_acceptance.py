"""The acceptance suites of the contract, where they lie beside the project."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITES = Path(__file__).parents[3] / "shared" / "acceptance"


@pytest.mark.skipif(not SUITES.is_dir(), reason=f"no acceptance suites at {SUITES}")
@pytest.mark.parametrize("suite", ["test_contract.py", "test_model.py"])
def test_the_acceptance_suites_pass(suite):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITES / suite)]
    environment = {**os.environ, "KVFOLIO_IMPL": "kvfolio"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
