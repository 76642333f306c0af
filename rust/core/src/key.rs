//! The identity of a full block's content: a SHA-256 chain over everything that its K and V depend on.
//!
//! Every message begins with the version of the encoding and a tag that says what follows; whatever has
//! no fixed length is preceded by its length. So no two different inputs are encoded alike, and a key is
//! the same in every process, on every machine. A block of 16 tokens without extras is 113 bytes: with
//! SHA-256's padding that is two compressions, and nothing else is done for it: such a message is put
//! together in place, where the hash would first gather its parts.
//!
//! ```text
//! root   "kvfolio" 01 'R' block_size:u32  4 x (length:u64 bytes)      model, adapter, tenant, salt
//! block  "kvfolio" 01 'B' num_tokens:u32 num_extras:u32 parent:32  num_tokens x token:u32
//!        num_extras x (start:i64 stop:i64 length:u64 digest)           relative to the block
//! ```
//!
//! All integers are little-endian. The parent of a chain's first block is the root.

use sha2::{Digest, Sha256, block_api::compress256};

use crate::context::{Context, Extra};

const VERSION: &[u8] = b"kvfolio\x01";

/// What a full block holds, its whole past included: equal keys are equal contents.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
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

/// The key of the block that holds `tokens` from position `first` on. `extras` are sorted by start.
fn block_key(parent: &Key, tokens: &[i32], first: usize, extras: &[Extra]) -> Key {
    #[cfg(test)]
    counting::NUM_BLOCKS.with(|count| count.set(count.get() + 1));
    let last = first + tokens.len();
    let touching = || extras.iter().take_while(|extra| extra.start < last).filter(|extra| extra.stop > first);
    match touching().count() {
        0 if tokens.len() <= SHORT_BLOCK => short_block_key(parent, tokens),
        num_extras => block_message(parent, tokens, first, num_extras, touching()).finish(),
    }
}

fn block_message<'a>(
    parent: &Key,
    tokens: &[i32],
    first: usize,
    num_extras: usize,
    extras: impl Iterator<Item = &'a Extra>,
) -> Message {
    let mut message = Message::new(b'B');
    message.put(&(tokens.len() as u32).to_le_bytes());
    message.put(&(num_extras as u32).to_le_bytes());
    message.put(&parent.0);
    // Few calls of the hash: a chunk of tokens at a time.
    let mut bytes = [0; 4 * TOKENS_AT_ONCE];
    for tokens in tokens.chunks(TOKENS_AT_ONCE) {
        put_tokens(&mut bytes, tokens);
        message.put(&bytes[..4 * tokens.len()]);
    }
    for extra in extras {
        for position in [extra.start, extra.stop] {
            message.put(&(position as i64).wrapping_sub(first as i64).to_le_bytes());
        }
        message.put_with_length(&extra.digest);
    }
    message
}

fn put_tokens(places: &mut [u8], tokens: &[i32]) {
    for (place, token) in places.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *place = token.to_le_bytes();
    }
}

/// Bytes of a block's message before its tokens.
const HEAD: usize = VERSION.len() + 1 + 4 + 4 + 32;

/// The most tokens of a block whose message, without extras, is of two compressions.
const SHORT_BLOCK: usize = (2 * 64 - PADDING - HEAD) / 4;

/// What SHA-256 appends at least: a bit, and the length.
const PADDING: usize = 9;

/// The same as the hash of the block's message: that message, padded as in FIPS 180-4, 5.1.1.
fn short_block_key(parent: &Key, tokens: &[i32]) -> Key {
    let mut message = [0; 2 * 64];
    let mut num_bytes = 0;
    let (num_tokens, num_extras) = ((tokens.len() as u32).to_le_bytes(), [0; 4]);
    for part in [VERSION, b"B", &num_tokens, &num_extras, &parent.0] {
        message[num_bytes..][..part.len()].copy_from_slice(part);
        num_bytes += part.len();
    }
    put_tokens(&mut message[num_bytes..], tokens);
    num_bytes += 4 * tokens.len();
    message[num_bytes] = 0x80;
    let padded = (num_bytes + PADDING).next_multiple_of(64);
    message[padded - 8..padded].copy_from_slice(&(8 * num_bytes as u64).to_be_bytes());
    let mut state = INITIAL_STATE;
    compress256(&mut state, message[..padded].as_chunks().0);
    let mut key = [0; 32];
    for (bytes, word) in key.as_chunks_mut().0.iter_mut().zip(state) {
        *bytes = word.to_be_bytes();
    }
    Key(key)
}

/// Of SHA-256: FIPS 180-4, 5.3.3.
const INITIAL_STATE: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

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

    /// The parent of the first block.
    pub(crate) fn root(&self) -> Key {
        self.root
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
            parent = block_key(&parent, block, first, extras);
            self.keys.push(parent);
        }
    }

    /// Forget the keys of all blocks but the first `num_blocks`.
    pub(crate) fn truncate(&mut self, num_blocks: usize) {
        self.keys.truncate(num_blocks);
    }
}

/// For tests of what is hashed how often.
#[cfg(test)]
pub(crate) mod counting {
    thread_local! {
        pub(super) static NUM_BLOCKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// Blocks that `work` hashed.
    pub(crate) fn hashed(work: impl FnOnce()) -> usize {
        let before = NUM_BLOCKS.get();
        work();
        NUM_BLOCKS.get() - before
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "these are tests")]
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
        let block = block_key(&root, &[1, 2, 3, 4], 0, &[]);
        assert_eq!(hex(block), "84780e5e0cd8dfbba1847566aaa47a5c52582f56b623b2425abefa9ad640b8cb");
    }

    /// Block size, what the context has, the key of the third block. Computed as above.
    const CHAINS: [(usize, &str, &str); 21] = [
        (1, "none", "20f7b3bf3bba0c6abbb0ed6302f735be58be938ce1df2b7e69ef2723f08b5101"),
        (1, "model", "b613b985107c8d3446cb694e0d6a5083d3038fac5767e7f770e7a78185e6b1ca"),
        (1, "adapter", "82feb2602e6eda1829b8ddc14d1687466b98e6d0409db0c4f0f1614153a11f3b"),
        (1, "tenant", "8161f2743cfeeb592b711e6b2e22bd0394c3340408ae83f82ab4b981bde05e1d"),
        (1, "salt", "93e90feb2508ad70a9e271021cf0e52fbbce221f0518fba94053160f8d9c73a2"),
        (1, "extras", "b4b3872cb12a09c59e2106b3795d1bc26d28652d50a1ed5ef2b77abc8a38a583"),
        (1, "all", "63509ca0c9acf94717b9435a7f0cc37756535e6bf93eade09a96493dda050e62"),
        (16, "none", "7b6ddb5050ffb178e0f99babb72610821acba890634747991b6f26ce527ba34e"),
        (16, "model", "b472c0461020a478a5a6a16b4dfa2f5666e3971e76d94d2e28c1a8c160af1634"),
        (16, "adapter", "0672b09cde3c1acdaa3bf7ba1057b3aaa5ad6cf67e9cdfb4d458b16ff1dbe45d"),
        (16, "tenant", "efeb66bdcc3fcc16d698566b596ba4b883ad552b3de24d0aa5acf26084fc8be5"),
        (16, "salt", "988a78d393ab1a0d144b169daf36663bd81e4d8d200a7b82dc1a5c61e4332ad7"),
        (16, "extras", "db8829273f983ee210ffeda563f7551143e9cd8338737465b6b93edf0bbbb340"),
        (16, "all", "bf1e63281a13785f0143a9149de7a4c6bef2d4908f3756191beec6f4f5eeb5fa"),
        (128, "none", "35090b90d7f67b690fb67e55ccef263f97d9ee5bea8af419f43b15f90fe65527"),
        (128, "model", "82bab3bd04e56388005647d84f99fdc0cd16d54f9cddd2365e16fee2b72d3325"),
        (128, "adapter", "6dcd0b050e29b716c537a3a35c8aa28e6418db081ace6891f4e8f08de452fc90"),
        (128, "tenant", "21518eaf30a1cc6127698cf5d5d88b69ef1d71f804e323d8460b3746619559c9"),
        (128, "salt", "b7c188e6455c03d4a3f4a1fef1804dbdd87b6e6d5b2fb4bad55e0429c2de096d"),
        (128, "extras", "4104ac5ba023cc36af97b275da05f2c283120039e7e8d31682a88d7e0c3eb8b8"),
        (128, "all", "59c6eaca09a91d396b462d3f39ebed9adeebf2a2a75ad72db537529c68a59795"),
    ];

    #[test]
    fn chains_are_the_same_in_every_process_and_version() {
        for (block_size, case, key) in CHAINS {
            let field = |name| {
                if case == name || case == "all" { format!("of the {name}, é") } else { String::new() }
            };
            let mut context = Context::default();
            (context.model, context.adapter) = (field("model"), field("adapter"));
            (context.tenant, context.salt) = (field("tenant"), field("salt"));
            let extra = |start, stop, digest| Extra::new(start, stop, digest).unwrap();
            let extras = match case {
                "extras" | "all" => vec![
                    extra(0, 1, b"".as_slice()),
                    extra(block_size - 1, block_size + 1, b"one"),
                    extra(2 * block_size, 2 * block_size + 3, b"two"),
                ],
                _ => Vec::new(),
            };
            let context = context.with_extras(extras);
            let tokens: Vec<_> =
                (0..3 * block_size as u64).map(|i| (i * 2_654_435_761 % (1 << 31)) as i32).collect();
            let mut chain = KeyChain::new(&context, block_size);
            for num_blocks in [1, 3] {
                chain.extend(&tokens, context.extras(), block_size, num_blocks);
            }
            assert_eq!(hex(chain.keys()[2]), key, "{block_size} {case}");
        }
    }

    #[test]
    fn short_blocks_have_the_keys_of_their_messages() {
        let tokens: Vec<_> = (0..SHORT_BLOCK as i32 + 4).map(|i| i * 0x0123_4567).collect();
        for num_tokens in 1..=tokens.len() {
            let (parent, tokens) = (Key([num_tokens as u8; 32]), &tokens[..num_tokens]);
            let message = block_message(&parent, tokens, 0, 0, std::iter::empty());
            let num_compressions = (message.num_bytes + PADDING).div_ceil(64);
            assert_eq!(num_compressions <= 2, num_tokens <= SHORT_BLOCK, "{num_tokens} tokens");
            assert_eq!(block_key(&parent, tokens, 0, &[]), message.finish(), "{num_tokens} tokens");
        }
    }

    #[test]
    fn a_block_of_sixteen_tokens_is_hashed_in_two_compressions() {
        let message = block_message(&Key([0; 32]), &[7; 16], 0, 0, std::iter::empty());
        let padded = message.num_bytes + PADDING;
        assert!(padded <= 128, "{padded} bytes");
    }
}
