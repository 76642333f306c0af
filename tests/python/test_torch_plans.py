"""Plans as tensors on a device, and a table that lives there."""

import kvfolio as kv
import numpy as np
import pytest
from bookkeeping import batch_of

torch = pytest.importorskip("torch")
import kvfolio.torch as kvt  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else ["meta"])]


def test_tensors_are_the_same_in_every_step_and_have_the_dtypes_that_kernels_want(recwarn):
    pool = kv.BlockPool(64, 4)
    batch = batch_of(pool, 4)
    buffers = kvt.PlanBuffers(batch, 16, pad_slot=-1)
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    wide = {name for name, tensor in buffers.tensors.items() if tensor.dtype == torch.int64}
    assert wide == {"positions", "slot_mapping", "logits_indices"}
    assert {tensor.dtype for name, tensor in buffers.tensors.items() if name not in wide} == {torch.int32}
    batch.add(pool.sequence([1, 2, 3, 4, 5]))
    batch.add(pool.sequence([6]))
    for step in range(9):
        plan = buffers.plan()
        for name, tensor in buffers.tensors.items():
            values = getattr(plan, name)
            here = tensor[tuple(map(slice, values.shape))]
            np.testing.assert_array_equal(here.numpy(), values, err_msg=f"{name} in step {step}")
        assert buffers.tensors["slot_mapping"][plan.num_tokens :].tolist() == [-1] * (16 - plan.num_tokens)
        plan.commit()
        plan.extend(torch.tensor([7, 8], dtype=torch.int64))
    assert addresses == {name: tensor.data_ptr() for name, tensor in buffers.tensors.items()}
    assert not recwarn.list


def test_one_copy_brings_a_plan_to_the_device_and_the_table_may_stay_behind():
    batch = batch_of(kv.BlockPool(64, 4), 4)
    buffers = kvt.PlanBuffers(batch, device=DEVICES[1], block_table=False)
    assert "block_table" not in buffers.tensors
    assert {tensor.device.type for tensor in buffers.tensors.values()} == {DEVICES[1]}
    batch.add(batch.pool.sequence([1]))
    buffers.plan().commit()
    if DEVICES[1] == "cuda":
        assert buffers.tensors["token_ids"].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("block_table", [True, False])
def test_the_csr_form_follows_the_table_to_the_device(block_table):
    """On a device that is no CPU by a copy of its own, so that plans without it are as cheap as before."""
    pool = kv.BlockPool(64, 4)
    batch = batch_of(pool, 4)
    buffers = kvt.PlanBuffers(batch, 16, max_pages=9, block_table=block_table)
    assert buffers.tensors["page_indices"].shape == (9,) and "block_table" in buffers.fields
    batch.add(pool.sequence(range(9)))
    batch.add(pool.sequence(range(50, 54)))
    plan = buffers.plan()
    buffers.write_csr(plan)
    assert buffers.tensors["page_indptr"].tolist() == [0, 3, 4, 4, 4]
    assert buffers.tensors["page_indices"].tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0]
    plan.commit()
    elsewhere = kvt.PlanBuffers(batch, 16, device=DEVICES[1], max_pages=9, block_table=block_table)
    copies = []
    memory = elsewhere._device_memory
    elsewhere._device_memory = Watched(memory, copies)
    batch.extend([0], [3])
    plan = elsewhere.plan()
    elsewhere.write_csr(plan)
    plan.commit()
    table, indptr, indices = (elsewhere.fields[n] for n in ("block_table", "page_indptr", "page_indices"))
    assert copies == [
        (0, table.offset + table.num_bytes * block_table),
        (indptr.offset, indices.offset + 4 * 3),
    ]
    if DEVICES[1] == "cuda":
        assert elsewhere.tensors["page_indptr"].tolist() == [0, 3, 3, 3, 3]
    batch.preempt(0)
    batch.extend([1], [3])
    plan = elsewhere.plan()
    elsewhere.write_csr(plan)
    plan.commit()
    assert copies[-1] == (indptr.offset, indices.offset + 4 * 3), "what was there before is blanked, too"


class Watched:
    """Device memory that tells which bytes are copied to it."""

    def __init__(self, memory, copies):
        self.memory, self.copies = memory, copies

    def __getitem__(self, place):
        self.copies.append((place.start or 0, place.stop))
        return self.memory[place]


@pytest.mark.parametrize("device", [device for device in DEVICES if device != "meta"])
def test_a_device_table_holds_every_plans_table(device):
    pool = kv.BlockPool(60, 2)
    batch = batch_of(pool, 5, 400)
    table = kvt.DeviceTable(batch, device=device)
    address = table.tensor.data_ptr()
    rng = np.random.default_rng(3)
    for step in range(200):
        rows = batch.rows
        if len(rows) < 5 and step % 4 != 1:
            batch.add(pool.sequence(rng.integers(0, 9, rng.integers(1, 9)).tolist()))
        elif step % 6 == 2:
            batch.preempt(rows[int(rng.integers(len(rows)))])
        elif step % 9 == 4:
            batch.reorder(rng.permutation(rows).tolist(), rows)
        for row in batch.rows:
            batch.extend([row], [int(rng.integers(9))])
        plan = batch.plan(rows=rng.permutation(batch.rows).tolist(), partial=True)
        table.update(plan)
        width = plan.block_table.shape[1]
        tables = table.of(torch.tensor(plan.rows, device=device)).cpu().numpy()
        for mine, theirs, length in zip(tables, plan.block_table, plan.seq_lens, strict=True):
            blocks = -(-int(length) // 2)
            assert mine[:blocks].tolist() == theirs[:blocks].tolist()
            assert width >= blocks
        if step % 10 == 7:
            plan.rollback()
        else:
            plan.commit()
    assert table.tensor.data_ptr() == address and table.tensor.dtype == torch.int32


def test_a_table_that_is_too_narrow_is_told_and_not_written():
    pool = kv.BlockPool(60, 2)
    batch = batch_of(pool, 2, 40)
    table = kvt.DeviceTable(batch, max_blocks=2)
    batch.add(pool.sequence(range(5)))
    with batch.plan() as plan, pytest.raises(IndexError, match="max_blocks must be above 2, not 2"):
        table.update(plan)
    assert not table.tensor.any()
    with pytest.raises(TypeError, match="batch must be a Batch, not int"):
        kvt.DeviceTable(3)
