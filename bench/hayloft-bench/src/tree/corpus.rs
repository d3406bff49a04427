//! Bytes to cut contents from: text like C source, and binary like object files.
//!
//! Made once per run. What matters is how well they compress and that they do not repeat at a distance that a
//! compressor or a cutter of content would see.

use crate::rng::Rng;

/// More than the window of a usual compressor, so that no file is compressed by the repetition.
pub(super) const CORPUS_BYTES: usize = 32 << 20;

const STEMS: &[&str] = &[
    "get", "set", "init", "alloc", "free", "find", "lookup", "update", "flush", "read", "write", "queue",
    "dev", "page", "inode", "node", "lock", "buf", "len", "size", "count", "flags", "state", "mask", "addr",
    "offset", "entry", "table", "list", "head", "next", "prev", "data", "priv", "ops", "info", "desc",
    "ctrl", "status", "clk", "irq", "dma", "port", "chan", "skb", "req", "resp", "cmd", "msg", "hdr", "ctx",
    "cfg", "reg", "val",
];
const TYPES: &[&str] =
    &["int", "u32", "void", "bool", "u8", "size_t", "unsigned long", "u64", "const char *"];
const WORDS: &[&str] = &[
    "the",
    "of",
    "a",
    "to",
    "is",
    "and",
    "if",
    "in",
    "this",
    "for",
    "be",
    "must",
    "when",
    "that",
    "not",
    "device",
    "are",
    "lock",
    "held",
    "with",
    "we",
    "can",
    "from",
    "it",
    "on",
    "buffer",
    "only",
    "caller",
    "set",
    "used",
    "before",
    "after",
    "value",
    "already",
    "been",
    "has",
    "no",
    "more",
    "than",
    "one",
    "return",
    "zero",
    "error",
    "hardware",
    "requires",
    "because",
    "otherwise",
    "interrupt",
    "pending",
    "reference",
    "released",
    "by",
];

fn identifier(rng: &mut Rng) -> String {
    let mut name = rng.pick(STEMS).to_string();
    for _ in 0..rng.below(3) {
        name = format!("{name}_{}", rng.pick(STEMS));
    }
    if rng.below(6) == 0 { name.to_uppercase() } else { name }
}

/// A program is about a few things: most of its names are from a small, slowly changing set.
struct Names {
    all: Vec<String>,
    local: Vec<String>,
}

impl Names {
    fn new(rng: &mut Rng) -> Self {
        let all: Vec<String> = (0..6000).map(|_| identifier(rng)).collect();
        let local = all[..30].to_vec();
        Names { all, local }
    }

    fn one(&mut self, rng: &mut Rng) -> &str {
        if rng.below(60) == 0 {
            let n = rng.below(self.local.len());
            self.local[n] = rng.pick(&self.all).clone();
        }
        let names = if rng.below(4) > 0 { &self.local } else { &self.all };
        rng.skewed::<String>(names)
    }
}

/// Text like C source.
pub(super) fn text(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut names = Names::new(&mut rng);
    let mut out = String::with_capacity(CORPUS_BYTES + 4096);
    while out.len() < CORPUS_BYTES {
        match rng.below(10) {
            0 => comment(&mut out, &mut rng),
            1 => definitions(&mut out, &mut names, &mut rng),
            _ => function(&mut out, &mut names, &mut rng),
        }
    }
    out.truncate(CORPUS_BYTES);
    out.into_bytes()
}

fn comment(out: &mut String, rng: &mut Rng) {
    out.push_str("/*\n");
    for _ in 0..1 + rng.below(5) {
        out.push_str(" *");
        for _ in 0..6 + rng.below(8) {
            out.push(' ');
            out.push_str(rng.skewed::<&str>(WORDS));
        }
        out.push('\n');
    }
    out.push_str(" */\n");
}

fn definitions(out: &mut String, names: &mut Names, rng: &mut Rng) {
    for _ in 0..3 + rng.below(12) {
        let name = names.one(rng).to_uppercase();
        out.push_str(&format!(
            "#define {name}_{}\t\t0x{:04x}\n",
            rng.pick(STEMS).to_uppercase(),
            rng.below(1 << 16)
        ));
    }
    out.push('\n');
}

fn function(out: &mut String, names: &mut Names, rng: &mut Rng) {
    let (kind, name) = (rng.skewed(TYPES), names.one(rng).to_owned());
    let (structure, argument) = (names.one(rng).to_owned(), names.one(rng).to_owned());
    out.push_str(&format!("static {kind} {name}(struct {structure} *{argument}, {} ", rng.skewed(TYPES)));
    out.push_str(&format!("{})\n{{\n", names.one(rng)));
    let mut depth = 1;
    for _ in 0..4 + rng.below(20) {
        let indent = "\t".repeat(depth);
        let (a, b) = (names.one(rng).to_owned(), names.one(rng).to_owned());
        let c = names.one(rng);
        let line = match rng.below(11) {
            0 if depth < 4 => {
                depth += 1;
                format!("if ({a}->{b} & {c}) {{")
            }
            1 if depth < 4 => {
                depth += 1;
                format!("for (i = 0; i < {a}->{c}; i++) {{")
            }
            2 | 3 if depth > 1 => {
                depth -= 1;
                format!("}} /* {c} */")
            }
            4 => format!("if (!{a})\n{indent}\treturn -EINVAL;"),
            5 => format!("{a} = {b}({c}, {});", rng.below(256)),
            6 => format!("{argument}->{a} = {b};"),
            7 => format!("ret = {a}({argument}, &{b}->{c});"),
            8 => format!("mutex_lock(&{a}->lock);"),
            9 => format!("pr_debug(\"%s: {a} %d\\n\", __func__, {b});"),
            _ => format!("{a} |= {c} << {};", rng.below(32)),
        };
        out.push_str(&format!("{indent}{line}\n"));
    }
    while depth > 1 {
        depth -= 1;
        out.push_str(&format!("{}}}\n", "\t".repeat(depth)));
    }
    out.push_str("\treturn ret;\n}\n\n");
}

/// Binary like object files.
pub(super) fn objects(seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut names = Names::new(&mut rng);
    // Instructions: a few forms are most of the code.
    let forms: Vec<Vec<u8>> =
        (0..250).map(|_| (0..1 + rng.below(6)).map(|_| rng.next() as u8).collect()).collect();
    let mut out = Vec::with_capacity(CORPUS_BYTES + (64 << 10));
    while out.len() < CORPUS_BYTES {
        let end = out.len() + 512 + rng.below(8 << 10);
        match rng.below(8) {
            0..=2 => {
                while out.len() < end {
                    out.extend_from_slice(rng.skewed::<Vec<u8>>(&forms));
                    if rng.below(4) == 0 {
                        // A displacement or an address: small, so the upper bytes are equal.
                        out.extend_from_slice(&(rng.below(48) as u32 * 8).to_le_bytes());
                    }
                }
            }
            3..=5 => relocations(&mut out, end, &mut rng),
            6 => {
                while out.len() < end {
                    out.extend_from_slice(names.one(&mut rng).as_bytes());
                    out.push(0);
                }
            }
            _ => out.resize(out.len() + 64 + rng.below(1024), 0),
        }
    }
    out.truncate(CORPUS_BYTES);
    out
}

/// Entries as of a `.rela` section: where, which symbol and how, and what to add.
fn relocations(out: &mut Vec<u8>, end: usize, rng: &mut Rng) {
    let (mut place, symbols) = (0u64, 20 + rng.below(200));
    while out.len() < end {
        place += 4 + rng.below(40) as u64;
        let info = ((rng.below(symbols) as u64) << 32) | *rng.skewed(&[2u64, 4, 1, 11]);
        for word in [place, info, if rng.below(2) == 0 { (-4i64) as u64 } else { rng.below(512) as u64 }] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many times smaller zstd's usual level makes it, cut into pieces as a store would.
    fn ratio(corpus: &[u8], piece: usize) -> f64 {
        let sample = &corpus[..8 << 20];
        let packed: usize = sample.chunks(piece).map(|c| zstd::bulk::compress(c, 3).unwrap().len()).sum();
        sample.len() as f64 / packed as f64
    }

    #[test]
    fn content_compresses_like_what_it_stands_for() {
        // Source 3 to 4 times; objects without debug information somewhat less.
        for (name, corpus, wanted) in [("text", text(1), 3.0..4.4), ("objects", objects(2), 2.1..3.2)] {
            let (small, large) = (ratio(&corpus, 11 << 10), ratio(&corpus, 128 << 10));
            println!("{name}: {small:.2} in pieces of 11 KiB, {large:.2} in pieces of 128 KiB");
            assert!(wanted.contains(&small) && wanted.contains(&large), "{name}: {small} {large}");
        }
    }

    #[test]
    fn the_seed_decides() {
        assert!(text(1) == text(1) && text(1) != text(2));
    }
}
