//! Which block holds a key: a hash table of block ids over an array of keys.

use hashbrown::HashTable;

use crate::{ids::BlockId, key::Key};

pub(super) struct Index {
    table: HashTable<BlockId>,
    /// By block; meaningful while the block is in the table.
    keys: Vec<Key>,
}

impl Index {
    pub(super) fn new(num_blocks: usize) -> Self {
        Self { table: HashTable::new(), keys: vec![Key::ZERO; num_blocks + 1] }
    }

    /// The block with this key; all 256 bits are compared.
    pub(super) fn find(&self, key: &Key) -> Option<BlockId> {
        let is_it = |block: &BlockId| self.keys[block.index()] == *key;
        self.table.find(key.index_bits(), is_it).copied()
    }

    /// The caller has seen that the key is not there.
    pub(super) fn insert(&mut self, key: Key, block: BlockId) {
        self.keys[block.index()] = key;
        let keys = &self.keys;
        self.table.insert_unique(key.index_bits(), block, |block| keys[block.index()].index_bits());
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        let bits = self.keys[block.index()].index_bits();
        if let Ok(entry) = self.table.find_entry(bits, |other| *other == block) {
            entry.remove();
        }
    }

    /// The last key that the block had.
    pub(super) fn key(&self, block: BlockId) -> Key {
        self.keys[block.index()]
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = BlockId> + '_ {
        self.table.drain()
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_agree_in_the_bits_of_the_index_are_told_apart() {
        let mut index = Index::new(200);
        let key = |n: u8| {
            let mut bytes = [7; 32];
            bytes[8 + usize::from(n) % 24] = n;
            Key::from_bytes(bytes)
        };
        for n in 0..200 {
            assert_eq!(index.find(&key(n)), None);
            index.insert(key(n), BlockId::new(u32::from(n) + 1));
        }
        for n in 0..200 {
            assert_eq!(index.find(&key(n)), Some(BlockId::new(u32::from(n) + 1)));
        }
        for n in (0..200_u8).step_by(2) {
            index.remove(BlockId::new(u32::from(n) + 1));
        }
        for n in 0..200 {
            assert_eq!(index.find(&key(n)).is_some(), n % 2 == 1);
        }
    }
}
