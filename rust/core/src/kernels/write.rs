//! Writing a step's K and V into their slots.

use super::element::Element;
use super::error::{KernelError, check_size};
use super::threads;
use super::view::{PagedView, PagedViewMut, TokenView};

/// Elements of K below which waking another thread costs more than it saves.
const WORTH_SHARING: usize = 1 << 18;

/// Puts token `t`'s K and V, `[tokens, num_kv_heads, head_dim]`, into slot `slots[t]`, that is block
/// `slots[t] / block_size` at offset `slots[t] % block_size`. Tokens with a negative slot are passed over.
/// Of tokens with the same slot the last one stays.
pub fn write<E: Element>(
    k: &TokenView<'_, E>,
    v: &TokenView<'_, E>,
    keys: &mut PagedViewMut<'_, E>,
    values: &mut PagedViewMut<'_, E>,
    slots: &[i64],
) -> Result<(), KernelError> {
    check(["k", "keys"], k, keys.as_view(), slots)?;
    check(["v", "values"], v, values.as_view(), slots)?;
    check_size("v", "num_kv_heads", k.shape()[1], v.shape()[1])?;
    let [tokens, heads, head_dim] = k.shape();

    // Work is shared out by K and V and by heads, not by tokens, so that two tokens with one slot are no data race.
    let share = tokens * heads * head_dim >= WORTH_SHARING;
    let pieces = if share { threads::count().div_ceil(2).clamp(1, heads) } else { 1 };
    let bounds = |piece: usize| piece * heads / pieces..(piece + 1) * heads / pieces;
    let (keys, values) = (&*keys, &*values);
    threads::for_each(2 * pieces, share, |item| {
        let (source, target) = if item % 2 == 0 { (k, keys) } else { (v, values) };
        write_heads(source, target, slots, bounds(item / 2));
    });
    Ok(())
}

fn check<E: Element>(
    [name, storage]: [&'static str; 2],
    rows: &TokenView<'_, E>,
    view: &PagedView<'_, E>,
    slots: &[i64],
) -> Result<(), KernelError> {
    let [num_blocks, block_size, heads, head_dim] = view.shape();
    check_size(name, "num_kv_heads", heads, rows.shape()[1])?;
    check_size(name, "head_dim", head_dim, rows.shape()[2])?;
    check_size(name, "number of tokens", slots.len(), rows.shape()[0])?;
    check_size(storage, "block_size", block_size.max(1), block_size)?;
    let limit = num_blocks * block_size;
    match slots.iter().position(|&slot| slot >= limit as i64) {
        Some(token) => Err(KernelError::Slot { token, limit, found: slots[token] }),
        None => Ok(()),
    }
}

fn write_heads<E: Element>(
    source: &TokenView<'_, E>,
    target: &PagedViewMut<'_, E>,
    slots: &[i64],
    heads: std::ops::Range<usize>,
) {
    let [_, block_size, all_heads, head_dim] = target.as_view().shape();
    // Where heads are adjacent on both sides, all of a token's are one piece, and where tokens are, too, all of those
    // that go into neighbouring slots of a block.
    let at_once = source.has_adjacent_heads() && target.as_view().has_adjacent_heads();
    let step = if at_once { heads.len().max(1) } else { 1 };
    let token = (all_heads * head_dim) as isize;
    let adjacent = source.token_stride() == token && target.as_view().token_stride() == token;
    let joins = at_once && adjacent && heads.len() == all_heads;
    let mut next = 0;
    while let Some(&slot) = slots.get(next) {
        let first = next;
        next += 1;
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let (block, offset) = (slot / block_size, slot % block_size);
        if joins {
            let follows = |&(place, &other): &(usize, &i64)| other == (slot + place) as i64;
            let rest = slots[first..].iter().take(block_size - offset).enumerate();
            next = first + rest.take_while(follows).count();
        }
        for head in heads.clone().step_by(step) {
            let from = source.row(first, head);
            let to = target.row_mut(block, offset, head);
            // SAFETY: both are addresses of `step` adjacent rows of `head_dim` elements inside their views, or of as
            // many of each of the tokens up to `next`, which are adjacent, too. Pieces of work have different heads, so
            // no other thread writes these rows. They may overlap if the caller passes part of the storage as source,
            // which `copy` allows.
            unsafe { from.copy_to(to, (next - first) * step * head_dim) };
        }
    }
}
