//! Which files a tree has, from a seed. The figures are those of a kernel source tree and of building it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::rng::{Rng, mix};

/// Source files of the whole tree.
pub(crate) const SOURCES: usize = 21_280;
/// Their size together.
pub(crate) const SOURCE_BYTES: u64 = 233_000_000;
/// Directories, the root of the tree among them.
pub(crate) const DIRECTORIES: usize = 1_263;
/// Files that a build writes beside the sources.
pub(crate) const OUTPUTS: usize = 3_263;
/// Their size together.
pub(crate) const OUTPUT_BYTES: u64 = 713_000_000;

/// Directories by depth; the root has depth 0.
const BY_DEPTH: [usize; 7] = [1, 24, 540, 510, 160, 25, 3];

/// Share of the files (or directories), and the size (or number of files) that they are below.
type Quantiles = &'static [(f64, f64)];

const SOURCE_SIZES: Quantiles = &[
    (0.0, 12.0),
    (0.05, 159.0),
    (0.25, 1_300.0),
    (0.5, 4_100.0),
    (0.75, 11_100.0),
    (0.9, 26_000.0),
    (0.99, 97_000.0),
    (1.0, 874_000.0),
];
const OUTPUT_SIZES: Quantiles = &[
    (0.0, 900.0),
    (0.25, 8_000.0),
    (0.5, 15_000.0),
    (0.75, 110_000.0),
    (0.9, 198_000.0),
    (0.99, 2_800_000.0),
    (1.0, 64_000_000.0),
];
const FILES_IN_DIRECTORY: Quantiles =
    &[(0.0, 1.0), (0.25, 3.0), (0.5, 8.0), (0.75, 16.0), (0.9, 33.0), (0.99, 150.0), (1.0, 745.0)];

/// What kind of bytes a file holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Source,
    Output,
}

/// A file to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FilePlan {
    /// Relative to the root of the tree.
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// Different for every file; its content follows from this.
    pub(crate) id: u64,
    /// Where in its corpus the content begins: right behind that of the file before.
    pub(crate) corpus_offset: u64,
}

/// A whole tree, in the order in which it is written.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// Relative, parents first, without the root itself.
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) sources: Vec<FilePlan>,
    pub(crate) outputs: Vec<FilePlan>,
}

impl Plan {
    /// The tree of `seed`, with `scale` times the usual number of files and directories.
    pub(crate) fn new(seed: u64, scale: f64) -> Self {
        let mut rng = Rng::new(seed);
        let count = |full: usize| ((full as f64 * scale).round() as usize).max(1);
        let directories = directories(&mut rng, scale);
        let sizes = sample(SOURCE_SIZES, SOURCES, SOURCE_BYTES, count(SOURCES), &mut rng);
        let counts = file_counts(directories.len(), sizes.len(), &mut rng);
        let mut sources = name_sources(&directories, &counts, &mut rng);
        let sizes_of_outputs = sample(OUTPUT_SIZES, OUTPUTS, OUTPUT_BYTES, count(OUTPUTS), &mut rng);
        let mut outputs = choose_outputs(&directories, &sources, sizes_of_outputs.len(), &mut rng);
        place(&mut sources, &sizes, mix(seed));
        place(&mut outputs, &sizes_of_outputs, mix(seed ^ 1));
        Plan { directories: directories.into_iter().skip(1).collect(), sources, outputs }
    }

    pub(crate) fn source_bytes(&self) -> u64 {
        self.sources.iter().map(|f| f.bytes).sum()
    }

    pub(crate) fn output_bytes(&self) -> u64 {
        self.outputs.iter().map(|f| f.bytes).sum()
    }
}

/// Gives every file its size and the place of its content.
fn place(files: &mut [FilePlan], sizes: &[u64], seed: u64) {
    let mut corpus_offset = 0;
    for (n, (file, bytes)) in files.iter_mut().zip(sizes).enumerate() {
        (file.bytes, file.corpus_offset, file.id) = (*bytes, corpus_offset, mix(seed ^ n as u64));
        corpus_offset += bytes;
    }
}

/// `count` values of the distribution, in random order.
fn sample(quantiles: Quantiles, full_count: usize, full_sum: u64, count: usize, rng: &mut Rng) -> Vec<u64> {
    let mut values = Curve::with_sum(quantiles, full_count, full_sum).values(count);
    rng.shuffle(&mut values);
    values
}

/// A distribution through given quantiles, straight between them on a logarithmic scale, except above the 90 %
/// one, where it is bent until the sum is right.
struct Curve {
    quantiles: Quantiles,
    full_count: usize,
    bend: f64,
}

impl Curve {
    fn with_sum(quantiles: Quantiles, full_count: usize, sum: u64) -> Self {
        let (mut low, mut high) = (0.1, 30.0);
        let mut curve = Curve { quantiles, full_count, bend: low };
        for _ in 0..40 {
            curve.bend = (low + high) / 2.0;
            // A stronger bend keeps values low for longer.
            if curve.values(full_count).iter().sum::<u64>() > sum {
                low = curve.bend
            } else {
                high = curve.bend
            }
        }
        curve
    }

    fn at(&self, share: f64) -> f64 {
        let upper =
            self.quantiles.iter().position(|(q, _)| share <= *q).unwrap_or(self.quantiles.len() - 1).max(1);
        let ((q0, v0), (q1, v1)) = (self.quantiles[upper - 1], self.quantiles[upper]);
        let t = (share - q0) / (q1 - q0);
        let t = if q0 >= 0.9 { t.powf(self.bend) } else { t };
        v0 * (v1 / v0).powf(t)
    }

    /// In ascending order; their sum is `count` times the mean of the distribution.
    fn values(&self, count: usize) -> Vec<u64> {
        // Few values are means of parts of many: taken from the middle of each part, they would lack the largest
        // files, which hold much of the bytes.
        let fine = count.max(self.full_count);
        let share = |n: usize| if n + 1 == fine { 1.0 } else { (n as f64 + 0.5) / fine as f64 };
        let mut sums = vec![(0.0, 0); count];
        for n in 0..fine {
            let (sum, members) = &mut sums[n * count / fine];
            *sum += self.at(share(n));
            *members += 1;
        }
        sums.iter().map(|(sum, members)| (sum / *members as f64).round() as u64).collect()
    }
}

/// Number of source files for each of `directories` directories, `files` in all, none without.
fn file_counts(directories: usize, files: usize, rng: &mut Rng) -> Vec<usize> {
    let sampled = sample(FILES_IN_DIRECTORY, DIRECTORIES, SOURCES as u64, directories, rng);
    let mut counts: Vec<usize> = sampled.into_iter().map(|n| n as usize).collect();
    let largest = counts.iter().copied().max().unwrap_or(1);
    // Rounding leaves the sum a little off: spread the rest over directories of more than middling size.
    let few = directories < 30;
    let least = usize::from(files >= directories);
    let mut sum: usize = counts.iter().sum();
    let mut n = 0;
    while sum != files {
        let count = &mut counts[n % directories];
        let adjustable = few || (9..largest).contains(count);
        if adjustable && sum < files {
            (*count, sum) = (*count + 1, sum + 1);
        } else if adjustable && *count > least {
            (*count, sum) = (*count - 1, sum - 1);
        }
        n += 1;
    }
    counts
}

/// Paths of all directories, depth first, the root (an empty path) in front.
fn directories(rng: &mut Rng, scale: f64) -> Vec<PathBuf> {
    let mut paths = vec![PathBuf::new()];
    let mut taken = HashSet::new();
    let mut parents: Vec<PathBuf> = paths.clone();
    for full in &BY_DEPTH[1..] {
        let count = ((*full as f64 * scale).round() as usize).max(1);
        let mut level = Vec::new();
        while level.len() < count {
            // A few directories (drivers, architectures) have most of the subdirectories.
            let parent = rng.skewed(&parents);
            let path = parent.join(unused_name(parent, "", &mut taken, rng));
            level.push(path);
        }
        paths.extend_from_slice(&level);
        parents = level;
    }
    paths.sort();
    paths
}

const SYLLABLES: &[&str] = &[
    "dev", "net", "core", "mem", "io", "bus", "clk", "reg", "irq", "dma", "phy", "usb", "pci", "sched", "fs",
    "inode", "page", "map", "lock", "queue", "table", "main", "init", "probe", "ctl", "host", "cache",
    "timer", "event", "trace", "crypto", "hash", "tree", "list", "util", "debug", "power", "sensor", "audio",
    "video",
];

/// A name that nothing else in `parent` has.
fn unused_name(parent: &Path, extension: &str, taken: &mut HashSet<PathBuf>, rng: &mut Rng) -> String {
    let mut stem = rng.pick(SYLLABLES).to_string();
    while rng.below(3) > 0 && stem.len() < 20 {
        stem = format!("{stem}{}{}", rng.pick(&["_", "-", ""]), rng.pick(SYLLABLES));
    }
    let numbered = |number: u32| match number {
        1 => format!("{stem}{extension}"),
        _ => format!("{stem}{number}{extension}"),
    };
    (1..).map(numbered).find(|name| taken.insert(parent.join(name))).expect("numbers do not run out")
}

/// The files of each directory, in the order of their names; sizes are given later.
fn name_sources(directories: &[PathBuf], counts: &[usize], rng: &mut Rng) -> Vec<FilePlan> {
    // By how many of twenty files have it.
    const EXTENSIONS: [&str; 20] = [
        ".c", ".c", ".c", ".c", ".c", ".c", ".c", ".c", ".c", ".c", ".h", ".h", ".h", ".h", ".h", ".h",
        ".dts", ".rst", ".S", ".txt",
    ];
    // Names of directories are taken as well.
    let mut taken: HashSet<PathBuf> = directories.iter().cloned().collect();
    let mut files = Vec::new();
    for (directory, count) in directories.iter().zip(counts) {
        let mut paths: Vec<PathBuf> = (0..*count)
            .map(|n| match n {
                0 if *count > 2 => directory.join("Makefile"),
                _ => directory.join(unused_name(directory, rng.pick::<&str>(&EXTENSIONS), &mut taken, rng)),
            })
            .collect();
        paths.sort();
        files.extend(paths.into_iter().map(|path| file(path, Kind::Source)));
    }
    files
}

/// What compiling writes: an object beside each C file, directory by directory, in some of the directories.
fn choose_outputs(
    directories: &[PathBuf],
    sources: &[FilePlan],
    count: usize,
    rng: &mut Rng,
) -> Vec<FilePlan> {
    let mut built: Vec<&PathBuf> = directories.iter().collect();
    rng.shuffle(&mut built);
    let rank: std::collections::HashMap<&Path, usize> =
        built.iter().enumerate().map(|(n, d)| (d.as_path(), n)).collect();
    let mut objects: Vec<(usize, PathBuf)> = sources
        .iter()
        .filter(|f| f.path.extension().is_some_and(|e| e == "c"))
        .map(|f| (rank[f.path.parent().expect("a relative file")], f.path.with_extension("o")))
        .collect();
    objects.sort();
    // A tree of very few files may lack C files: the rest of the outputs is then its listings.
    objects.extend(sources.iter().map(|f| (usize::MAX, listing_of(&f.path))));
    objects.into_iter().take(count).map(|(_, path)| file(path, Kind::Output)).collect()
}

fn listing_of(source: &Path) -> PathBuf {
    let mut path = source.as_os_str().to_owned();
    path.push(".lst");
    path.into()
}

fn file(path: PathBuf, kind: Kind) -> FilePlan {
    FilePlan { path, bytes: 0, kind, id: 0, corpus_offset: 0 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn at(sorted: &[u64], share: f64) -> f64 {
        sorted[((sorted.len() as f64 * share) as usize).min(sorted.len() - 1)] as f64
    }

    fn assert_near(what: &str, value: f64, wanted: f64, tolerance: f64) {
        assert!((value / wanted - 1.0).abs() <= tolerance, "{what}: {value}, wanted {wanted}");
    }

    fn sorted_sizes(files: &[FilePlan]) -> Vec<u64> {
        let mut sizes: Vec<u64> = files.iter().map(|f| f.bytes).collect();
        sizes.sort();
        sizes
    }

    #[test]
    fn the_whole_tree_has_the_published_figures() {
        let plan = Plan::new(1, 1.0);
        assert_eq!((plan.sources.len(), plan.outputs.len()), (SOURCES, OUTPUTS));
        assert_eq!(plan.directories.len() + 1, DIRECTORIES);
        assert_near("source bytes", plan.source_bytes() as f64, SOURCE_BYTES as f64, 0.005);
        assert_near("output bytes", plan.output_bytes() as f64, OUTPUT_BYTES as f64, 0.005);
        for (files, quantiles) in [(&plan.sources, SOURCE_SIZES), (&plan.outputs, OUTPUT_SIZES)] {
            let sizes = sorted_sizes(files);
            for (share, wanted) in &quantiles[1..] {
                assert_near(&format!("size at {share}"), at(&sizes, *share), *wanted, 0.02);
            }
        }
    }

    #[test]
    fn directories_have_the_published_figures() {
        let plan = Plan::new(1, 1.0);
        let depths: Vec<usize> = plan.directories.iter().map(|d| d.components().count()).collect();
        assert_eq!(depths.iter().max(), Some(&6));
        assert_near("mean depth", depths.iter().sum::<usize>() as f64 / DIRECTORIES as f64, 2.7, 0.02);
        let mut counts: HashMap<&Path, u64> = HashMap::new();
        plan.sources.iter().for_each(|f| *counts.entry(f.path.parent().unwrap()).or_default() += 1);
        assert_eq!(counts.len(), DIRECTORIES);
        let mut counts: Vec<u64> = counts.into_values().collect();
        counts.sort();
        assert_eq!((at(&counts, 0.5), at(&counts, 1.0)), (8.0, 745.0));
    }

    #[test]
    fn a_small_tree_keeps_the_shape() {
        let plan = Plan::new(1, 0.02);
        assert_near("files", plan.sources.len() as f64, SOURCES as f64 * 0.02, 0.01);
        assert_near("source bytes", plan.source_bytes() as f64, SOURCE_BYTES as f64 * 0.02, 0.1);
        assert_near("output bytes", plan.output_bytes() as f64, OUTPUT_BYTES as f64 * 0.02, 0.2);
        assert_near("median size", at(&sorted_sizes(&plan.sources), 0.5), 4_100.0, 0.05);
        assert_eq!(plan.directories.iter().map(|d| d.components().count()).max(), Some(6));
    }

    #[test]
    fn paths_are_unique_and_parents_come_first() {
        for scale in [0.0001, 0.003, 0.02, 1.0] {
            let plan = Plan::new(7, scale);
            let mut seen: HashSet<&Path> = HashSet::from([Path::new("")]);
            for directory in &plan.directories {
                assert!(seen.contains(directory.parent().unwrap()), "{}", directory.display());
                assert!(seen.insert(directory));
            }
            for file in plan.sources.iter().chain(&plan.outputs) {
                assert!(seen.contains(file.path.parent().unwrap()));
                assert!(seen.insert(&file.path), "{}", file.path.display());
            }
        }
    }

    #[test]
    fn the_seed_decides() {
        assert_eq!(Plan::new(3, 0.02), Plan::new(3, 0.02));
        assert_ne!(Plan::new(3, 0.02), Plan::new(4, 0.02));
    }
}
