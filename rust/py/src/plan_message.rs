//! A plan in a few bytes, for a process that mirrors the batch's tables (`kvfolio.TableMirror` reads it).
//!
//! All are little-endian int32: a header of the magic number, the plan's number in two halves, the block size
//! and how long the lists are; then the lists. What can be made of the others or of the mirrored table is not
//! among them.

use kvfolio::Plan;

/// "kv" and the version of the encoding.
const MAGIC: i32 = 0x6B76_0001;

pub(crate) fn encode(plan: &Plan) -> Vec<u8> {
    let arrays = plan.arrays();
    let number = plan.number();
    let logits_indices: Vec<_> = arrays.logits_indices().iter().map(|index| *index as i32).collect();
    let header = [
        MAGIC,
        number as i32,
        (number >> 32) as i32,
        plan.block_size() as i32,
        arrays.rows().len() as i32,
        arrays.num_tokens() as i32,
        arrays.copies().len() as i32,
        arrays.table_updates().len() as i32,
        logits_indices.len() as i32,
        arrays.skipped().len() as i32,
        arrays.never_fit().len() as i32,
    ];
    let lists = [
        &header[..],
        arrays.rows(),
        arrays.query_start_loc(),
        arrays.seq_lens(),
        arrays.token_ids(),
        arrays.copies().as_flattened(),
        arrays.table_updates().as_flattened(),
        arrays.logits_rows(),
        &logits_indices,
        arrays.skipped(),
        arrays.never_fit(),
    ];
    lists.into_iter().flatten().flat_map(|number| number.to_le_bytes()).collect()
}
