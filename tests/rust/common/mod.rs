//! What all tests of the bookkeeping share.

use kvfolio::BlockPool;

/// Nobody has a block any more, and all records agree.
pub(crate) fn assert_all_free(pool: &BlockPool) {
    pool.audit().unwrap();
    assert_eq!(pool.num_free(), pool.num_blocks(), "{pool:?}");
    assert_eq!(pool.num_quarantined(), 0, "{pool:?}");
}
