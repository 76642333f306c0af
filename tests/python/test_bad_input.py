"""Every argument of every call, wrong in every way: a typed error that names it, and nothing has changed."""

import decimal
import inspect
from types import SimpleNamespace

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of, compute, publish, unchanged


def new_world():
    """A pool with blocks in every state, and one of everything that lives in it."""
    pool = kv.BlockPool(24, 4)
    publish(pool, range(100, 108))
    lent = pool.allocate(2)
    table = pool.table()
    table.append(6)
    batch = batch_of(pool, 4, 32)
    seq, other = pool.sequence(range(6)), pool.sequence(range(50, 55))
    for running in (seq, other):
        compute(batch, running)
    seq.extend(2)
    other.extend([9])
    spare = pool.sequence(range(60, 63))
    spare.extend(2)
    plan = batch.plan(rows=[1])
    return SimpleNamespace(
        pool=pool, lent=lent, table=table, batch=batch, seq=seq, other=other, spare=spare, plan=plan
    )


@pytest.fixture
def world():
    world = new_world()
    yield world
    if "in flight" in repr(world.plan):
        world.plan.rollback()
    world.pool.audit()


def things(w):
    return w.table, w.batch, w.seq, w.other, w.spare


class Call(SimpleNamespace):
    """An argument of a call: what kind it is of, and how to make the call with a value for it."""


def number(good, call, *, optional=False, at_least=0, named=None):
    return Call(kind="number", good=good, call=call, optional=optional, at_least=at_least, named=named)


def numbers(good, call, *, optional=False, or_number=False, named=None):
    kind = "numbers or number" if or_number else "numbers"
    return Call(kind=kind, good=good, call=call, optional=optional, named=named)


def flag(call):
    return Call(kind="bool", call=call, optional=False)


def instance(kind, call, *, optional=False):
    return Call(kind=kind, call=call, optional=optional)


LENGTH = "num_tokens"  # what is too long in all is told by the length that it would have
CALLS = {
    "block_layout.num_tokens": number(5, lambda w, x: kv.block_layout(x, 4)),
    "block_layout.block_size": number(4, lambda w, x: kv.block_layout(5, x), at_least=1),
    "BlockPool.num_blocks": number(3, lambda w, x: kv.BlockPool(x, 4), at_least=1),
    "BlockPool.block_size": number(4, lambda w, x: kv.BlockPool(3, x), at_least=1),
    "BlockPool.prefix_cache": flag(lambda w, x: kv.BlockPool(3, 4, prefix_cache=x)),
    "BlockPool.events": flag(lambda w, x: kv.BlockPool(3, 4, events=x)),
    "BlockPool.events.array_events": flag(
        lambda w, x: kv.BlockPool(3, 4, events=True).events(array_events=x)
    ),
    "BlockPool.events.data_parallel_rank": number(
        0, lambda w, x: kv.BlockPool(3, 4, events=True).events(data_parallel_rank=x), optional=True
    ),
    "BlockPool.allocate.n": number(2, lambda w, x: w.pool.allocate(x)),
    "BlockPool.share.ids": numbers([3, 4], lambda w, x: w.pool.share(x)),
    "BlockPool.release.ids": numbers([3, 4], lambda w, x: w.pool.release(x)),
    "BlockPool.ref_count.block_id": number(3, lambda w, x: w.pool.ref_count(x)),
    "BlockPool.match.token_ids": numbers([100, 101, 102, 103], lambda w, x: w.pool.match(x)),
    "BlockPool.match.context": instance("Context", lambda w, x: w.pool.match([1], x), optional=True),
    "BlockPool.blocks_needed.seq": instance("Sequence", lambda w, x: w.pool.blocks_needed(x)),
    "BlockPool.table.block_ids": numbers([3, 4], lambda w, x: w.pool.table(x), optional=True),
    "BlockPool.table.num_tokens": number(8, lambda w, x: w.pool.table(w.lent, x), optional=True),
    "BlockPool.sequence.token_ids": numbers([1, 2], lambda w, x: w.pool.sequence(x)),
    "BlockPool.sequence.context": instance(
        "Context", lambda w, x: w.pool.sequence([1], context=x), optional=True
    ),
    "BlockPool.sequence.read_cache": flag(lambda w, x: w.pool.sequence([1], read_cache=x)),
    "BlockPool.sequence.write_cache": flag(lambda w, x: w.pool.sequence([1], write_cache=x)),
    "BlockTable.append.n": number(3, lambda w, x: w.table.append(x)),
    "BlockTable.locate.position": number(3, lambda w, x: w.table.locate(x)),
    "BlockTable.slots.start": number(3, lambda w, x: w.table.slots(x, 5)),
    "BlockTable.slots.stop": number(3, lambda w, x: w.table.slots(0, x)),
    "BlockTable.fork.num_tokens": number(3, lambda w, x: w.table.fork(x), optional=True),
    "BlockTable.truncate.num_tokens": number(3, lambda w, x: w.table.truncate(x)),
    "BlockTable.discard_before.position": number(4, lambda w, x: w.table.discard_before(x)),
    "Sequence.extend.token_ids": numbers([1, 2], lambda w, x: w.seq.extend(x), or_number=True, named=LENGTH),
    "Sequence.resolve.token_ids": numbers([1, 2], lambda w, x: w.seq.resolve(x)),
    "Sequence.truncate.n": number(3, lambda w, x: w.seq.truncate(x)),
    "Sequence.discard_before.position": number(4, lambda w, x: w.seq.discard_before(x)),
    "Batch.pool": instance("BlockPool", lambda w, x: kv.Batch(x, max_sequences=1, max_tokens_per_sequence=1)),
    "Batch.max_sequences": number(2, lambda w, x: batch_of(w.pool, x), at_least=1),
    "Batch.max_tokens_per_sequence": number(2, lambda w, x: batch_of(w.pool, 1, x), at_least=1),
    "Batch.add.seq": instance("Sequence", lambda w, x: w.batch.add(x)),
    "Batch.remove.row": number(0, lambda w, x: w.batch.remove(x)),
    "Batch.preempt.row": number(0, lambda w, x: w.batch.preempt(x)),
    "Batch.extend.rows": numbers([1, 0], lambda w, x: w.batch.extend(x, [7, 8]), named="row"),
    "Batch.extend.token_ids": numbers([7, 8], lambda w, x: w.batch.extend([0, 1], x)),
    "Batch.extend_unknown.rows": numbers([1, 0], lambda w, x: w.batch.extend_unknown(x), named="row"),
    "Batch.reorder.parents": numbers([0], lambda w, x: w.batch.reorder(x), named="row"),
    "Batch.reorder.rows": numbers([0], lambda w, x: w.batch.reorder([0], x), optional=True, named="row"),
    "Batch.shortfall.max_tokens": number(2, lambda w, x: w.batch.shortfall(x), optional=True, at_least=1),
    "Batch.shortfall.rows": numbers(
        [1, 0], lambda w, x: w.batch.shortfall(rows=x), optional=True, named="row"
    ),
    "Batch.shortfall.num_tokens": numbers(
        [1, 0], lambda w, x: w.batch.shortfall(num_tokens=x), optional=True, or_number=True
    ),
    "Batch.plan.max_tokens": number(2, lambda w, x: w.batch.plan(x), optional=True, at_least=1),
    "Batch.plan.partial": flag(lambda w, x: w.batch.plan(partial=x)),
    "Batch.plan.rows": numbers([1, 0], lambda w, x: w.batch.plan(rows=x), optional=True, named="row"),
    "Batch.plan.num_tokens": numbers(
        [1, 0], lambda w, x: w.batch.plan(num_tokens=x), optional=True, or_number=True
    ),
    "Plan.commit.num_accepted": numbers([1], lambda w, x: w.plan.commit(x), optional=True),
    "Plan.extend.token_ids": numbers([7], lambda w, x: w.plan.extend(x)),
}
ELSEWHERE = {
    "Batch.plan.out",  # test_plan_buffers.py
    "BlockPool.eviction",  # test_block_pool.py
    "BlockPool.events.medium",  # test_events_pool.py
    "Sequence.extend.extras",  # test_context.py
    "Context.extras",
    "Context.model",
    "Context.adapter",
    "Context.tenant",
    "Context.salt",
}


def calls(*kinds, **facts):
    """The arguments of these kinds of which these facts hold."""
    chosen = [
        name for name, call in CALLS.items() if call.kind in kinds and facts.items() <= vars(call).items()
    ]
    return pytest.mark.parametrize("name", chosen)


def refused(world, name, value, errors):
    """The error that a value raises: of one of these classes, naming the argument, leaving no trace."""
    call, argument = CALLS[name], name.rpartition(".")[2]
    with unchanged(world.pool, *things(world)), pytest.raises(errors) as refusal:
        call.call(world, value)
    message = " ".join([str(refusal.value), *getattr(refusal.value, "__notes__", [])])
    assert argument in message or (call.named and call.named in message), message
    return refusal.value, message


def test_every_argument_is_tried():
    arguments = {f"block_layout.{name}" for name in inspect.signature(kv.block_layout).parameters}
    for cls in (kv.BlockPool, kv.BlockTable, kv.Sequence, kv.Context, kv.Batch, kv.Plan):
        if cls in (kv.BlockPool, kv.Context, kv.Batch):
            arguments |= {f"{cls.__name__}.{name}" for name in inspect.signature(cls).parameters}
        for method in (name for name in vars(cls) if not name.startswith("_")):
            if callable(getattr(cls, method)):
                names = list(inspect.signature(getattr(cls, method)).parameters)[1:]
                arguments |= {f"{cls.__name__}.{method}.{name}" for name in names}
    assert arguments == CALLS.keys() | ELSEWHERE


class Other:
    """Not a number, nor a sequence, nor anything else."""


class Broken:
    def __index__(self):
        raise ZeroDivisionError


NO_NUMBERS = [
    True,
    False,
    np.True_,
    1.0,
    float("nan"),
    np.float32(1),
    1j,
    "1",
    "",
    b"1",
    decimal.Decimal(1),
    Other(),
    Broken(),
    {1},
    np.array(1.0),
    np.array(True),
    np.datetime64(1, "s"),
]


@calls("number")
def test_a_number_is_an_integer(world, name):
    for value in [*NO_NUMBERS, [1], (), np.array([1]), np.array([[1]])]:
        error, message = refused(world, name, value, TypeError)
        assert type(error) is TypeError and f"must be an integer, not {type(value).__name__}" in message


@calls("number", optional=False)
def test_a_number_is_not_none_unless_it_may_be(world, name):
    refused(world, name, None, TypeError)


@calls("number")
def test_a_number_is_in_range(world, name):
    for value in [-1, -(2**31), -(2**63), -(2**70), 2**63, 2**64, 2**70, np.int8(-1)]:
        _, message = refused(world, name, value, (ValueError, IndexError))
        assert f"not {value}" in message and ("between" in message or "at least" in message)


@calls("number")
def test_a_number_that_cannot_be_printed_is_refused_too(world, name):
    for value in (10**5000, -(10**5000)):
        refused(world, name, value, (ValueError, IndexError))


@calls("number", at_least=1)
def test_a_number_is_at_least_its_minimum(world, name):
    _, message = refused(world, name, 0, ValueError)
    assert "1" in message and "not 0" in message


@calls("number")
def test_large_numbers_are_counted_or_refused(world, name):
    may_be_large = {"num_tokens", "block_size", "max_tokens", "data_parallel_rank"}
    for value in [2**31, 2**32 + 3, 2**62, 2**63 - 1]:
        try:
            end(world, CALLS[name].call(world, value))
        except (ValueError, IndexError, kv.OutOfBlocks):
            continue
        assert name.split(".")[-1] in may_be_large


@calls("number")
@pytest.mark.parametrize("kind", [int, np.int8, np.uint64, np.array, lambda n: Index(n)])
def test_a_number_may_be_of_any_integer_type(world, name, kind):
    end(world, CALLS[name].call(world, kind(CALLS[name].good)))


class Index:
    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def end(world, result):
    """Leave no plan behind that would warn."""
    if isinstance(result, kv.Plan):
        if "in flight" in repr(world.plan):
            world.plan.rollback()
        result.rollback()


NO_SEQUENCES = [value for value in NO_NUMBERS if not isinstance(value, Broken)]


@calls("numbers", "numbers or number")
def test_numbers_are_a_flat_sequence(world, name):
    for value in [*NO_SEQUENCES, {1: 1}, (i for i in range(2)), iter([1])]:
        error, message = refused(world, name, value, TypeError)
        assert type(error) is TypeError and type(value).__name__ in message
        assert "must be a flat sequence of integers" in message or "must be an integer" in message


@calls("numbers", "numbers or number", optional=False)
def test_numbers_are_not_none_unless_they_may_be(world, name):
    refused(world, name, None, TypeError)


@calls("numbers")
def test_numbers_are_not_one_number(world, name):
    for value in [1, 0, -1, 2**70, np.int64(1), np.array(1)]:
        refused(world, name, value, TypeError)


NO_INTEGERS = [
    [1.0],
    [1, 2.5],
    ["1"],
    [b"1"],
    [None],
    [1, None],
    [True],
    (1, True),
    [np.True_, 1],
    [Other()],
    [1j],
    np.array([1.0]),
    np.array([True]),
    np.array(["1"]),
    np.array([1], "m8[s]"),
    np.array([1], object) + 0.5,
]


@calls("numbers", "numbers or number")
def test_numbers_are_integers(world, name):
    for value in NO_INTEGERS:
        error, message = refused(world, name, value, TypeError)
        assert type(error) is TypeError and "must hold integers, not " in message


NOT_FLAT = [
    [[1]],
    [[]],
    [[1], [1, 2]],
    [1, [2]],
    np.zeros((1, 1), int),
    np.zeros((0, 3), int),
    np.zeros((1, 1, 1), int),
]


@calls("numbers", "numbers or number")
def test_numbers_are_one_dimensional(world, name):
    for value in NOT_FLAT:
        _, message = refused(world, name, value, ValueError)
        assert "must be a flat sequence of integers" in message


OUT_OF_RANGE = [
    [-1],
    [1, -1],
    [-(2**63)],
    [2**31],
    [2**32],
    [2**63 - 1],
    [2**63],
    [-1, 2**63],
    [2**70],
    [-(2**70)],
    [10**5000],
    np.array([-1], np.int8),
    np.array([2**32], np.int64),
    np.array([2**63], np.uint64),
    np.array([2**64 - 1], np.uint64),
    np.array([2**70], object),
]


@calls("numbers", "numbers or number")
def test_numbers_are_in_range(world, name):
    for value in OUT_OF_RANGE:
        if name.endswith(".num_tokens") and len(value) == 1 and 0 <= value[0] < 2**63:
            continue  # a cap may be large
        refused(world, name, value, ValueError)


def packed(values, dtype):
    """The same numbers as a field of packed records: neither aligned nor a whole number of items apart."""
    records = np.zeros(len(values), [("pad", "i1"), ("value", dtype)])
    records["value"] = values
    return records["value"]


def read_only(values):
    array = np.array(values)
    array.flags.writeable = False
    return array


FORMS = {
    "tuple": tuple,
    "int32": lambda values: np.array(values, np.int32),
    "int64": np.array,
    "uint8": lambda values: np.array(values, np.uint8),
    "uint64": lambda values: np.array(values, np.uint64),
    "object": lambda values: np.array(values, object),
    "big-endian": lambda values: np.array(values, ">i4"),
    "strided": lambda values: np.repeat(values, 3)[::3],
    "strided int32": lambda values: np.repeat(np.array(values, np.int32), 3)[::3],
    "reversed": lambda values: np.array(values[::-1])[::-1],
    "column": lambda values: np.array([values, values]).T[:, 0],
    "read-only": read_only,
    "packed int32": lambda values: packed(values, "<i4"),
    "packed int64": lambda values: packed(values, "<i8"),
    "packed int16": lambda values: packed(values, "<i2"),
    "unaligned": lambda values: np.frombuffer(b"\0" + np.array(values, "<i8").tobytes(), "<i8", offset=1),
    "numpy items": lambda values: [np.int16(value) for value in values],
}


@calls("numbers", "numbers or number")
def test_numbers_may_come_in_any_layout(name):
    def outcome(form):
        fresh = new_world()
        result = CALLS[name].call(fresh, form(CALLS[name].good))
        fresh.pool.audit()
        seen = [
            fresh.pool.num_referenced,
            [fresh.pool.ref_count(block) for block in range(1, 25)],
            [seq.token_ids.tolist() for seq in (fresh.seq, fresh.other, fresh.spare)],
            repr(fresh.batch),
            repr(result),
        ]
        for plan in (fresh.plan, result):
            if isinstance(plan, kv.Plan) and "in flight" in repr(plan):
                seen.append(plan.rows.tolist())
                plan.rollback()
        return seen

    expected = outcome(list)
    for form in FORMS.values():
        assert outcome(form) == expected


@calls("bool")
def test_a_flag_is_a_bool(world, name):
    for value in [0, 1, None, "", "yes", 1.0, [], Other()]:
        _, message = refused(world, name, value, TypeError)
        assert "bool" in message


@calls("Sequence", "BlockPool", "Context")
def test_an_object_is_of_its_class(world, name):
    for value in [1, "x", (), Other(), kv.Sequence, world.table]:
        _, message = refused(world, name, value, TypeError)
        assert f"must be a {CALLS[name].kind}" in message and f"not {type(value).__name__}" in message


@calls("Sequence", "BlockPool")
def test_an_object_is_not_none(world, name):
    refused(world, name, None, TypeError)


def test_objects_are_made_by_the_pool_only():
    for cls in (kv.BlockTable, kv.Sequence, kv.Plan):
        with pytest.raises(TypeError, match=cls.__name__):
            cls()


def test_no_attribute_can_be_set(world):
    for thing in (world.pool, world.table, world.seq, world.batch, world.plan):
        for name in ("num_tokens", "anything"):
            with pytest.raises(AttributeError):
                setattr(thing, name, 1)


def test_classes_cannot_be_extended():
    for cls in (kv.BlockPool, kv.BlockTable, kv.Sequence, kv.Context, kv.Batch, kv.Plan):
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Mine", (cls,), {})
