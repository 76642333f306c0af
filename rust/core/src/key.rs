//! The identity of a full block's content: a SHA-256 chain over everything that its K and V depend on.
//!
//! Every message begins with the version of the encoding and a tag that says what follows; whatever has
//! no fixed length is preceded by its length. So no two different inputs are encoded alike, and a key is
//! the same in every process, on every machine. A block of 16 tokens without extras is 113 bytes: with
//! SHA-256's padding that is two compressions.
//!
//! ```text
//! root   "kvfolio" 01 'R' block_size:u32  4 x (length:u64 bytes)      model, adapter, tenant, salt
//! block  "kvfolio" 01 'B' num_tokens:u32 num_extras:u32 parent:32  num_tokens x token:u32
//!        num_extras x (start:i64 stop:i64 length:u64 digest)           relative to the block
//! ```
//!
//! All integers are little-endian. The parent of a chain's first block is the root.

use sha2::{Digest, Sha256};

use crate::context::{Context, Extra};

const VERSION: &[u8] = b"kvfolio\x01";

/// What a full block holds, its whole past included: equal keys are equal contents.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Key([u8; 32]);

impl Key {
    /// The 256 bits.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The bits as four numbers.
    pub(crate) fn words(&self) -> [u64; 4] {
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(self.0.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    pub(crate) fn from_words(words: [u64; 4]) -> Self {
        let mut key = Self([0; 32]);
        for (bytes, word) in key.0.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        key
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

/// A message on its way into the hash.
struct Message {
    hash: Sha256,
    num_bytes: usize,
}

impl Message {
    fn new(tag: u8) -> Self {
        let mut message = Self { hash: Sha256::new(), num_bytes: 0 };
        message.put(VERSION);
        message.put(&[tag]);
        message
    }

    fn put(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
        self.num_bytes += bytes.len();
    }

    fn put_with_length(&mut self, bytes: &[u8]) {
        self.put(&(bytes.len() as u64).to_le_bytes());
        self.put(bytes);
    }

    fn finish(self) -> Key {
        Key(self.hash.finalize().into())
    }
}

/// The parent of a chain's first block.
fn root_key(context: &Context, block_size: usize) -> Key {
    let mut message = Message::new(b'R');
    message.put(&(block_size as u32).to_le_bytes());
    for field in [&context.model, &context.adapter, &context.tenant, &context.salt] {
        message.put_with_length(field.as_bytes());
    }
    message.finish()
}

/// The message about the block that holds `tokens` from position `first` on. `extras` are sorted by start.
fn block_message(parent: &Key, tokens: &[i32], first: usize, extras: &[Extra]) -> Message {
    let last = first + tokens.len();
    let touching = || extras.iter().take_while(|extra| extra.start < last).filter(|extra| extra.stop > first);
    let mut message = Message::new(b'B');
    message.put(&(tokens.len() as u32).to_le_bytes());
    message.put(&(touching().count() as u32).to_le_bytes());
    message.put(&parent.0);
    // Few calls of the hash: a chunk of tokens at a time.
    let mut bytes = [0; 4 * TOKENS_AT_ONCE];
    for tokens in tokens.chunks(TOKENS_AT_ONCE) {
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        message.put(&bytes[..4 * tokens.len()]);
    }
    for extra in touching() {
        for position in [extra.start, extra.stop] {
            message.put(&(position as i64).wrapping_sub(first as i64).to_le_bytes());
        }
        message.put_with_length(&extra.digest);
    }
    message
}

const TOKENS_AT_ONCE: usize = 16;

/// The keys of a sequence's full blocks, hashed once and only as far as they were needed.
#[derive(Clone)]
pub(crate) struct KeyChain {
    root: Key,
    keys: Vec<Key>,
}

impl KeyChain {
    pub(crate) fn new(context: &Context, block_size: usize) -> Self {
        Self { root: root_key(context, block_size), keys: Vec::new() }
    }

    pub(crate) fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Describe the first `num_blocks` blocks, or as many as `tokens`, which are all known, fill.
    pub(crate) fn extend(&mut self, tokens: &[i32], extras: &[Extra], block_size: usize, num_blocks: usize) {
        let num_blocks = num_blocks.min(tokens.len() / block_size);
        if self.keys.len() >= num_blocks {
            return;
        }
        let mut parent = *self.keys.last().unwrap_or(&self.root);
        let done = self.keys.len() * block_size;
        let mut extras = extras;
        for (index, block) in tokens[done..num_blocks * block_size].chunks_exact(block_size).enumerate() {
            let first = done + index * block_size;
            // Those that lie wholly in front concern no block any more, and mostly stand in front, too.
            let passed = extras.iter().take_while(|extra| extra.stop <= first).count();
            extras = &extras[passed..];
            parent = block_message(&parent, block, first, extras).finish();
            self.keys.push(parent);
        }
    }

    /// Forget the keys of all blocks but the first `num_blocks`.
    pub(crate) fn truncate(&mut self, num_blocks: usize) {
        self.keys.truncate(num_blocks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(key: Key) -> String {
        format!("{key:?}")
    }

    #[test]
    fn keys_are_the_same_in_every_process_and_version() {
        let root = root_key(&Context::default(), 4);
        // Computed apart from this code: tests/python/test_keys.py does it again with hashlib.
        assert_eq!(hex(root), "ae82dd9a945907573b3717c55ff60f366ec3522875fd89a1f791427f674f9c06");
        let block = block_message(&root, &[1, 2, 3, 4], 0, &[]).finish();
        assert_eq!(hex(block), "84780e5e0cd8dfbba1847566aaa47a5c52582f56b623b2425abefa9ad640b8cb");
    }

    #[test]
    fn a_block_of_sixteen_tokens_is_hashed_in_two_compressions() {
        let message = block_message(&Key([0; 32]), &[7; 16], 0, &[]);
        let padded = message.num_bytes + 9; // SHA-256 appends a bit and the length
        assert!(padded <= 128, "{padded} bytes");
    }
}
