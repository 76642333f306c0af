import copy
import importlib.metadata
import inspect
import pickle
import subprocess
import sys
import weakref

import kvfolio as kv
import pytest
from bookkeeping import batch_of

BASES = {
    "OutOfBlocks": MemoryError,
    "InvalidBlock": ValueError,
    "StaleHandle": RuntimeError,
    "PlanInFlight": RuntimeError,
    "BatchFull": RuntimeError,
    "ConcurrentUse": RuntimeError,
    "RefCountOverflow": OverflowError,
    "CorruptPool": Exception,
    "CopiesNotApplied": RuntimeError,
    "CudaUnavailable": RuntimeError,
}
CLASSES = (kv.BlockPool, kv.BlockTable, kv.Sequence, kv.Context, kv.Batch, kv.Plan)


def test_an_import_needs_numpy_only():
    program = """
import sys, numpy
before = set(sys.modules)
import kvfolio
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= {"kvfolio", "numpy", "ml_dtypes"}


def test_every_public_name_is_there_and_documented():
    assert len(kv.__all__) == len(set(kv.__all__))
    for name in set(kv.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(kv, name)), name


@pytest.mark.parametrize("cls", CLASSES)
def test_every_public_member_is_documented(cls):
    for name, member in vars(cls).items():
        if not name.startswith("_"):
            assert member.__doc__, name


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_says_where_it_lives(cls):
    assert cls.__module__ == "kvfolio" and getattr(kv, cls.__name__) is cls


def test_errors_are_all_of_one_family():
    errors = {name for name in kv.__all__ if inspect.isclass(getattr(kv, name))}
    errors = {name for name in errors if issubclass(getattr(kv, name), kv.KVFolioError)}
    assert errors - {"KVFolioError"} == BASES.keys()
    for name, base in BASES.items():
        assert issubclass(getattr(kv, name), base)


def again(error):
    return [
        copy.copy(error),
        copy.deepcopy(error),
        *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
    ]


def test_a_refusal_keeps_its_numbers_when_it_is_copied():
    with pytest.raises(kv.OutOfBlocks) as refusal:
        kv.BlockPool(3, 4).allocate(5)
    for error in again(refusal.value):
        assert type(error) is kv.OutOfBlocks and str(error) == str(refusal.value)
        assert (error.needed, error.free, error.quarantined, error.ever_fits) == (5, 3, 0, False)


def test_cuda_unavailable_keeps_its_fields_when_it_is_copied():
    for error in again(kv.CudaUnavailable("nvcc", "there is none", "pip install it")):
        assert (error.missing, error.reason, error.remedy) == ("nvcc", "there is none", "pip install it")
        assert str(error) == "the CUDA kernels need nvcc: there is none. To get it: pip install it"


@pytest.mark.parametrize("name", sorted(BASES.keys() - {"OutOfBlocks", "CudaUnavailable"}))
def test_errors_keep_their_message_when_they_are_copied(name):
    for error in again(getattr(kv, name)("what happened")):
        assert type(error) is getattr(kv, name) and str(error) == "what happened"


def test_what_lives_in_one_process_stays_there():
    pool = kv.BlockPool(8, 4)
    batch, seq = batch_of(pool), pool.sequence([1, 2, 3])
    batch.add(seq)
    with batch.plan() as plan:
        for thing in (pool, pool.table(), seq, batch, plan):
            message = f"a {type(thing).__name__} cannot be pickled or copied"
            refused = [copy.copy, copy.deepcopy, lambda thing: copy.deepcopy([thing])]
            if thing is not plan:  # of which a message can be sent
                refused.append(pickle.dumps)
            for refuse in refused:
                with pytest.raises(TypeError, match=message):
                    refuse(thing)


def test_everything_can_be_referred_to_weakly():
    pool = kv.BlockPool(8, 4)
    batch = batch_of(pool)
    with batch.plan() as plan:
        for thing in (pool, pool.table(), pool.sequence([]), batch, plan):
            assert weakref.ref(thing)() is thing


def test_the_version_is_that_of_the_installation():
    try:
        installed = importlib.metadata.version("kvfolio")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from the source tree")
    assert kv.__version__ == installed


def test_the_version_has_three_numbers():
    assert len([int(part) for part in kv.__version__.partition("-")[0].split(".")]) == 3
