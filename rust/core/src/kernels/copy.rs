//! Copying whole blocks: the copy-on-write of a plan.

use std::collections::HashSet;

use super::element::Element;
use super::error::KernelError;
use super::threads;
use super::view::PagedViewMut;

/// Bytes that are worth a thread's turn.
const PIECE: usize = 1 << 19;

/// Copies block `src` onto block `dst` for every pair `[src, dst]`, in every view (K and V of every layer).
/// All sources are read as they were before the call, so a destination may be another pair's source.
pub fn copy_blocks<E: Element>(
    views: &mut [PagedViewMut<'_, E>],
    copies: &[[i32; 2]],
) -> Result<(), KernelError> {
    check(views, copies)?;
    let sources: HashSet<i32> = copies.iter().map(|pair| pair[0]).collect();
    // A pool never hands out a copy's source as a destination, so the detour is for hand-made lists.
    let staged = copies.iter().any(|[src, dst]| src != dst && sources.contains(dst));
    let views = &*views;
    if staged {
        threads::for_each(views.len(), true, |index| copy_staged(&views[index], copies));
        return Ok(());
    }
    let block =
        views.iter().map(|view| view.as_view().shape()[1..].iter().product::<usize>()).max().unwrap_or(0);
    let most = (PIECE / (block * size_of::<E>()).max(1)).max(1);
    let pieces: Vec<&[[i32; 2]]> = copies.chunks(most).collect();
    let share = views.len() * copies.len() * block * size_of::<E>() >= PIECE;
    threads::for_each(views.len() * pieces.len(), share, |item| {
        let view = &views[item / pieces.len()];
        for &[src, dst] in pieces[item % pieces.len()].iter().filter(|[src, dst]| src != dst) {
            for_each_piece(view, |offset, head, length| {
                let from = view.as_view().row(src as usize, offset, head);
                let to = view.row_mut(dst as usize, offset, head);
                // SAFETY: pieces of `length` elements inside two different blocks of one view. No two elements of a
                // view overlap, each destination is one thread's work, and none is anybody's source.
                unsafe { from.copy_to_nonoverlapping(to, length) };
            });
        }
    });
    Ok(())
}

fn check<E: Element>(views: &[PagedViewMut<'_, E>], copies: &[[i32; 2]]) -> Result<(), KernelError> {
    let Some(num_blocks) = views.iter().map(|view| view.as_view().shape()[0]).min() else {
        return Ok(());
    };
    let maximum = num_blocks.saturating_sub(1);
    let mut destinations = HashSet::with_capacity(copies.len());
    for (pair, ids) in copies.iter().enumerate() {
        for &found in ids {
            if found < 1 || found as usize > maximum {
                return Err(KernelError::CopyBlock { pair, maximum, found });
            }
        }
        if !destinations.insert(ids[1]) {
            return Err(KernelError::CopyTwice { pair, block: ids[1] });
        }
    }
    Ok(())
}

fn copy_staged<E: Element>(view: &PagedViewMut<'_, E>, copies: &[[i32; 2]]) {
    let mut stage = Vec::new();
    for &[src, _] in copies {
        for_each_piece(view, |offset, head, length| {
            let from = view.as_view().row(src as usize, offset, head);
            // SAFETY: a piece of `length` initialized elements inside the view that no other thread writes.
            stage.extend((0..length).map(|i| unsafe { from.add(i).read() }));
        });
    }
    let mut rest = stage.as_slice();
    for &[_, dst] in copies {
        for_each_piece(view, |offset, head, length| {
            let (piece, behind) = rest.split_at(length);
            rest = behind;
            let to = view.row_mut(dst as usize, offset, head);
            // SAFETY: `piece` holds `length` elements of its own, `to` is a piece of as many inside the view.
            unsafe { piece.as_ptr().copy_to_nonoverlapping(to, length) };
        });
    }
}

/// Calls `visit(offset, head, length)` for the largest pieces of a block that are adjacent in memory.
fn for_each_piece<E: Element>(view: &PagedViewMut<'_, E>, mut visit: impl FnMut(usize, usize, usize)) {
    let [_, block_size, heads, head_dim] = view.as_view().shape();
    if block_size * heads == 0 {
        return;
    }
    if view.as_view().has_dense_blocks() {
        return visit(0, 0, block_size * heads * head_dim);
    }
    let at_once = if view.as_view().has_adjacent_heads() { heads } else { 1 };
    for offset in 0..block_size {
        for head in (0..heads).step_by(at_once) {
            visit(offset, head, at_once * head_dim);
        }
    }
}
