//! The name of a tree: what it is worked out from, byte by byte. `docs/versions.md` says the same for whoever wants to compute it
//! with another program; both follow this file's tests.

use std::fmt;
use std::str::FromStr;

/// Bytes of a file that are hashed as one piece.
pub const PIECE: u64 = 64 * 1024;

/// What every node's hash begins with.
const BEGIN: &[u8] = b"hayloft-tree-1\0";

/// What the text of a name begins with.
const SCHEME: &str = "tree1-";

/// The type bits of a mode.
const KIND: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;
const BLOCK: u32 = 0o060_000;

/// The hash of a file, or of a directory with all that is in it.
pub type Node = [u8; 32];

/// The name by content of a tree: `tree1-` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TreeName(pub Node);

impl fmt::Display for TreeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl FromStr for TreeName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<TreeName, &'static str> {
        let digits = text.strip_prefix(SCHEME).ok_or("the name of a tree begins with tree1-")?;
        let hash = blake3::Hash::from_hex(digits);
        hash.map(|hash| TreeName(*hash.as_bytes()))
            .map_err(|_| "the name of a tree has 64 hexadecimal digits")
    }
}

/// What a file is beside its content.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attributes {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Of a device, `st_rdev`; of all else it does not count.
    pub rdev: u64,
    /// Extended attributes that count, see [`counts`], in the order of their names.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Whether an extended attribute belongs to the tree: not what a host or a kernel keeps for itself.
pub fn counts(xattr: &[u8]) -> bool {
    let own: [&[u8]; 3] = [b"security.selinux", b"security.ima", b"security.evm"];
    !xattr.starts_with(b"trusted.") && !own.contains(&xattr)
}

/// What a file holds.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Body {
    /// A file's size, and the hash of its content, see [`Pieces`].
    File {
        /// Bytes.
        size: u64,
        /// See [`Pieces`].
        content: [u8; 32],
    },
    /// Names and nodes, in the order of the names' bytes.
    Directory(Vec<(Vec<u8>, Node)>),
    /// Where a symbolic link leads.
    Link(Vec<u8>),
    /// Fifos, sockets, devices.
    Nothing,
}

/// Files of more pieces than this have sections of so many, the last one fewer: 256 GiB. Zeros of whole sections need not be hashed each time.
const SECTION: u64 = 1 << 22;

/// Works out the hash of a file's content: that of the hashes of its pieces of [`PIECE`] bytes, one after the other. Of a file with more than one
/// section it is that of the sections' hashes, each of which is that of the hashes of its pieces.
pub struct Pieces {
    section: blake3::Hasher,
    in_section: u64,
    /// The sections before this one.
    sections: blake3::Hasher,
    has_sections: bool,
    /// Pieces of a section.
    most: u64,
}

impl Default for Pieces {
    fn default() -> Pieces {
        Pieces::with_sections(SECTION)
    }
}

impl Pieces {
    fn with_sections(most: u64) -> Pieces {
        let [section, sections] = [(); 2].map(|()| blake3::Hasher::new());
        Pieces { section, in_section: 0, sections, has_sections: false, most }
    }

    /// The next piece, by its hash.
    pub fn push(&mut self, piece: &[u8; 32]) {
        self.end_full();
        self.section.update(piece);
        self.in_section += 1;
    }

    /// So many bytes of zeros, behind whole pieces. If they are no whole pieces themselves nothing follows.
    pub fn push_zeros(&mut self, bytes: u64) {
        let mut left = bytes / PIECE;
        if left > 0 {
            let some = zeros(PIECE).repeat(left.min(ZEROS_AT_A_TIME) as usize);
            while left > 0 {
                self.end_full();
                if self.in_section == 0 && left > self.most {
                    left -= self.push_zero_sections(left, &some);
                }
                let now = left.min(self.most - self.in_section).min(ZEROS_AT_A_TIME);
                self.section.update(&some[..32 * now as usize]);
                self.in_section += now;
                left -= now;
            }
        }
        if !bytes.is_multiple_of(PIECE) {
            self.push(&zeros(bytes % PIECE));
        }
    }

    /// As many sections of zeros as there are in so many pieces if others follow. Returns the number of their pieces. `some` has hashes of pieces of zeros.
    fn push_zero_sections(&mut self, pieces: u64, some: &[u8]) -> u64 {
        let mut section = blake3::Hasher::new();
        let mut left = self.most;
        while left > 0 {
            let now = left.min(some.len() as u64 / 32);
            section.update(&some[..32 * now as usize]);
            left -= now;
        }
        let count = (pieces - 1) / self.most;
        let hashes = section.finalize().as_bytes().repeat(count.min(ZEROS_AT_A_TIME) as usize);
        let mut left = count;
        while left > 0 {
            let now = left.min(ZEROS_AT_A_TIME);
            self.sections.update(&hashes[..32 * now as usize]);
            left -= now;
        }
        self.has_sections = true;
        count * self.most
    }

    /// A section ends when another piece follows.
    fn end_full(&mut self) {
        if self.in_section == self.most {
            self.sections.update(self.section.finalize().as_bytes());
            self.section.reset();
            (self.in_section, self.has_sections) = (0, true);
        }
    }

    /// The hash of the content.
    pub fn finish(&self) -> [u8; 32] {
        let section = self.section.finalize();
        if !self.has_sections {
            return section.into();
        }
        *self.sections.clone().update(section.as_bytes()).finalize().as_bytes()
    }
}

/// So many hashes of zeros are hashed at a time: together they are hashed faster.
const ZEROS_AT_A_TIME: u64 = 4096;

/// The hash of some bytes, as of a piece.
pub fn hash(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

/// The hash of so many zeros, as of a piece that is a hole.
pub fn zeros(len: u64) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    let zeros = [0; 4096];
    let mut left = len;
    while left > 0 {
        let some = left.min(zeros.len() as u64);
        hasher.update(&zeros[..some as usize]);
        left -= some;
    }
    *hasher.finalize().as_bytes()
}

/// The hash of a file with its attributes.
pub fn node(attributes: &Attributes, body: &Body) -> Node {
    let mut hasher = blake3::Hasher::new();
    hasher.update(BEGIN);
    for number in [attributes.mode, attributes.uid, attributes.gid] {
        hasher.update(&number.to_le_bytes());
    }
    let is_device = matches!(attributes.mode & KIND, CHARACTER | BLOCK);
    hasher.update(&if is_device { attributes.rdev } else { 0 }.to_le_bytes());
    let bytes = |hasher: &mut blake3::Hasher, bytes: &[u8]| {
        hasher.update(&(bytes.len() as u32).to_le_bytes());
        hasher.update(bytes);
    };
    hasher.update(&(attributes.xattrs.len() as u32).to_le_bytes());
    for (name, value) in &attributes.xattrs {
        bytes(&mut hasher, name);
        bytes(&mut hasher, value);
    }
    match body {
        Body::File { size, content } => {
            hasher.update(&size.to_le_bytes());
            hasher.update(content);
        }
        Body::Directory(entries) => {
            hasher.update(&(entries.len() as u64).to_le_bytes());
            for (name, node) in entries {
                bytes(&mut hasher, name);
                hasher.update(node);
            }
        }
        Body::Link(target) => bytes(&mut hasher, target),
        Body::Nothing => {}
    }
    *hasher.finalize().as_bytes()
}

/// Which kind of body a mode has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Link,
    /// All else.
    Special,
}

impl Kind {
    /// Of the type bits of a mode.
    pub fn of(mode: u32) -> Kind {
        match mode & KIND {
            REGULAR => Kind::File,
            DIRECTORY => Kind::Directory,
            LINK => Kind::Link,
            _ => Kind::Special,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(mode: u32) -> Attributes {
        Attributes { mode, uid: 0, gid: 0, rdev: 0, xattrs: Vec::new() }
    }

    /// Names that must never change: others have signed them. Computed by another program, from the table in docs/versions.md.
    #[test]
    fn names_stay_what_they_are() {
        let empty = node(&plain(0o040_755), &Body::Directory(Vec::new()));
        assert_eq!(TreeName(empty).to_string(), EMPTY);
        let mut pieces = Pieces::default();
        pieces.push(&hash(b"hello\n"));
        let file = node(&plain(0o100_644), &Body::File { size: 6, content: pieces.finish() });
        let attributes = Attributes {
            xattrs: vec![(b"user.note".to_vec(), b"x".to_vec())],
            uid: 1000,
            gid: 100,
            ..plain(0o042_775)
        };
        let link = node(&plain(0o120_777), &Body::Link(b"hello".to_vec()));
        let entries = vec![(b"hello".to_vec(), file), (b"link".to_vec(), link)];
        assert_eq!(TreeName(node(&attributes, &Body::Directory(entries))).to_string(), SOME);
    }

    const EMPTY: &str = "tree1-e94eb87541ce2fcbf7d0e523423e9a62ca9ac90a17b4697c08f08940c1d3f2bf";
    const SOME: &str = "tree1-c67065310a74660d6e331f2c804d4a3fc4a6f1c9d24263ffb5a490cc00a854d6";

    #[test]
    fn names_come_back_from_their_text() {
        let name = TreeName(hash(b"x"));
        assert_eq!(name.to_string().parse(), Ok(name));
        for wrong in ["", "tree1-", "tree1-12", "tree2-0000", &name.to_string()[1..]] {
            wrong.parse::<TreeName>().unwrap_err();
        }
    }

    #[test]
    fn holes_are_zeros() {
        for len in [0, 1, 4095, 4096, 4097, PIECE] {
            assert_eq!(zeros(len), hash(&vec![0; len as usize]), "{len}");
        }
    }

    #[test]
    fn zeros_are_pieces_like_others_in_any_section() {
        let most = 5;
        for before in 0..12 {
            for bytes in (0..23).flat_map(|pieces| [pieces * PIECE, pieces * PIECE + 7]) {
                let [mut one, mut other] = [(); 2].map(|()| Pieces::with_sections(most));
                for pieces in [&mut one, &mut other] {
                    (0..before).for_each(|at: u64| pieces.push(&hash(&at.to_le_bytes())));
                }
                one.push_zeros(bytes);
                (0..bytes / PIECE).for_each(|_| other.push(&zeros(PIECE)));
                if !bytes.is_multiple_of(PIECE) {
                    other.push(&zeros(bytes % PIECE));
                }
                assert_eq!(one.finish(), other.finish(), "{before} pieces, {bytes} bytes");
                if bytes.is_multiple_of(PIECE) {
                    [&mut one, &mut other].into_iter().for_each(|pieces| pieces.push(&hash(b"x")));
                    assert_eq!(one.finish(), other.finish(), "{before} pieces, {bytes} bytes, and one more");
                }
            }
        }
    }

    #[test]
    fn files_of_one_section_are_the_hash_of_their_pieces() {
        let hashes: Vec<[u8; 32]> = (0..11_u64).map(|at| hash(&at.to_le_bytes())).collect();
        let of = |hashes: &[[u8; 32]]| {
            let mut pieces = Pieces::with_sections(5);
            hashes.iter().for_each(|piece| pieces.push(piece));
            pieces.finish()
        };
        assert_eq!(of(&hashes[..5]), hash(&hashes[..5].concat()));
        let sections: Vec<[u8; 32]> = hashes.chunks(5).map(|section| hash(&section.concat())).collect();
        assert_eq!(of(&hashes), hash(&sections.concat()));
    }

    #[test]
    fn exabytes_of_zeros_have_a_hash_in_time() {
        let mut pieces = Pieces::default();
        pieces.push_zeros(i64::MAX as u64);
        assert_ne!(pieces.finish(), [0; 32]);
    }

    #[test]
    fn only_of_devices_the_number_counts() {
        let of = |mode, rdev| node(&Attributes { rdev, ..plain(mode) }, &Body::Nothing);
        assert_eq!(of(0o010_644, 1), of(0o010_644, 2));
        assert_ne!(of(0o020_644, 1), of(0o020_644, 2));
    }
}
