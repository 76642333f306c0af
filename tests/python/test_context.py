import copy
import itertools
import pickle

import kvfolio as kv
import pytest
from bookkeeping import batch_of, compute, publish, unchanged

FIELDS = ("model", "adapter", "tenant", "salt")


def test_a_context_is_empty_unless_told_otherwise():
    context = kv.Context()
    assert [getattr(context, field) for field in FIELDS] == [""] * 4
    assert context.extras == ()
    assert context == kv.Context(model="", extras=[])


def test_equal_contexts_are_equal_and_hash_alike():
    first, second = (kv.Context("m", "a", "t", "s", [(0, 1, b"x")]) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != kv.Context("m", "a", "t", "s", [(0, 1, b"y")])


def test_extras_are_kept_in_order_of_position():
    context = kv.Context(extras=[(5, 6, b"b"), (1, 9, b"a")])
    assert context.extras == ((1, 9, b"a"), (5, 6, b"b"))


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_keeps_a_cache_apart(field):
    pool = kv.BlockPool(8, 4)
    publish(pool, range(4), context=kv.Context(**{field: "x"}))
    assert pool.match(range(4), kv.Context(**{field: "x"})) == 4
    for other in [None, *(kv.Context(**{other: "x"}) for other in FIELDS if other != field)]:
        assert pool.match(range(4), other) == 0


def test_fields_do_not_run_into_each_other():
    texts = ["", "a", "b", "ab", "a\0", "\0a", "é"]
    contexts = [kv.Context(tenant=tenant, salt=salt) for tenant, salt in itertools.product(texts, texts)]
    pool = kv.BlockPool(len(contexts), 4)
    for context in contexts:
        assert pool.match(range(4), context) == 0
        publish(pool, range(4), context=context)
    assert pool.num_idle == len(contexts)


def test_the_empty_context_is_none():
    pool = kv.BlockPool(8, 4)
    publish(pool, range(4), context=kv.Context())
    assert pool.match(range(4)) == 4


def test_an_extra_concerns_the_blocks_that_it_touches_and_those_behind():
    pool = kv.BlockPool(16, 4)
    publish(pool, range(16), context=kv.Context(extras=[(5, 9, b"x")]))
    found = {digest: pool.match(range(16), kv.Context(extras=[(5, 9, digest)])) for digest in (b"x", b"y")}
    assert found == {b"x": 16, b"y": 4}
    assert pool.match(range(16)) == 4


@pytest.mark.parametrize("span", [(4, 9), (6, 9), (5, 8), (5, 10)])
def test_an_extra_elsewhere_is_another_one(span):
    pool = kv.BlockPool(16, 4)
    publish(pool, range(16), context=kv.Context(extras=[(5, 9, b"x")]))
    assert pool.match(range(16), kv.Context(extras=[(*span, b"x")])) == 4


def test_extras_told_late_count_like_extras_told_at_once():
    pool = kv.BlockPool(16, 4)
    seq = pool.sequence(range(4))
    seq.extend(range(4, 8), extras=[(5, 7, b"x")])
    compute(batch_of(pool), seq)
    assert pool.match(range(8), kv.Context(extras=[(5, 7, b"x")])) == 8
    assert pool.match(range(8)) == 4


def test_a_cut_takes_the_extras_behind_it_along():
    pool = kv.BlockPool(16, 4)
    seq = pool.sequence(range(8), context=kv.Context(extras=[(5, 7, b"x")]))
    seq.truncate(5)
    seq.extend(range(5, 8))
    compute(batch_of(pool), seq)
    assert pool.match(range(8)) == 8


@pytest.mark.parametrize("span", [(1, 1), (2, 1), (0, 0)])
def test_an_extra_covers_a_position(span):
    with pytest.raises(ValueError, match=f"extras stop must be at least {span[0] + 1}, not {span[1]}"):
        kv.Context(extras=[(*span, b"x")])


@pytest.mark.parametrize("bad", [-1, 2**63, 2**70])
def test_extras_lie_at_countable_positions(bad):
    for extra in [(bad, 5, b"x"), (0, bad, b"x")]:
        with pytest.raises(ValueError, match=rf"extras st.* not {bad}"):
            kv.Context(extras=[extra])


@pytest.mark.parametrize("bad", [3, 1.0, [3], [(1, 2)], [(1, 2, b"x", 4)], [None], "abc"])
def test_extras_are_triples(bad):
    with pytest.raises(TypeError, match=r"extras must .*\(start, stop, digest\), not "):
        kv.Context(extras=bad)
    pool = kv.BlockPool(4, 4)
    seq = pool.sequence([])
    with unchanged(pool, seq), pytest.raises(TypeError, match=r"extras must .*\(start, stop, digest\), not "):
        seq.extend([1], extras=bad)


@pytest.mark.parametrize("bad", ["x", bytearray(b"x"), memoryview(b"x"), 1, None])
def test_a_digest_is_bytes(bad):
    with pytest.raises(TypeError, match=f"bytes as digest, not {type(bad).__name__}"):
        kv.Context(extras=[(0, 1, bad)])


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_positions_of_extras_are_integers(bad):
    for extra in [(bad, 5, b"x"), (0, bad, b"x")]:
        with pytest.raises(TypeError, match=rf"extras st.* integer, not {type(bad).__name__}"):
            kv.Context(extras=[extra])


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_text_that_can_be_encoded(field):
    for bad in (1, b"x", True, ["x"]):
        with pytest.raises(TypeError, match=f"{field} must be a str, not {type(bad).__name__}"):
            kv.Context(**{field: bad})
    with pytest.raises(ValueError, match=field):
        kv.Context(**{field: "\ud800"})


def test_extras_that_raise_while_they_are_read_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        kv.Context(extras=(1 // 0 for _ in range(1)))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_context_pickles(protocol):
    context = kv.Context("m", "a", "t", "é", [(0, 1, b"\0"), (3, 5, b"")])
    again = pickle.loads(pickle.dumps(context, protocol))
    assert again == context and hash(again) == hash(context)
    assert again.extras == context.extras


def test_a_context_copies():
    context = kv.Context("m", extras=[(0, 1, b"x")])
    assert copy.copy(context) == copy.deepcopy(context) == context


def test_a_context_does_not_change():
    for field in FIELDS:
        with pytest.raises(AttributeError):
            setattr(kv.Context(), field, "x")


def test_a_contexts_repr_keeps_the_salt_secret():
    assert "hush" not in repr(kv.Context(model="m", salt="hush")) and "m" in repr(kv.Context(model="m"))
