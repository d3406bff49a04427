//! Everything that a volume and its fork can do to one thing, and what `hayloft merge` makes of it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::setup::farm::{Farm, run, run_failing};

/// What one side does in a folder of its own for each case.
const ACTS: [&str; 7] = [
    "kept",
    "changed",
    "renamed",
    "renamed and changed",
    "removed",
    "replaced by a folder",
    "replaced by another file",
];

/// The same, of a folder.
const ACTS_OF_FOLDER: [&str; 7] = [
    "kept",
    "renamed",
    "renamed alike",
    "removed",
    "replaced by a file",
    "what is in it moved out",
    "another one moved into it",
];

fn act(folder: &Path, what: &str, side: &str) {
    let it = folder.join("it");
    let inside = folder.join("it/in");
    let write = |path: &Path, text: &str| fs::write(path, text).unwrap();
    let rename = |to: &str| fs::rename(&it, folder.join(to)).unwrap();
    match what {
        "kept" => {}
        "changed" => write(&it, side),
        "renamed" => rename(side),
        "renamed alike" => rename("new"),
        "renamed and changed" => {
            write(&it, side);
            rename(side);
        }
        "removed" if it.is_dir() => fs::remove_dir_all(&it).unwrap(),
        "removed" => fs::remove_file(&it).unwrap(),
        "replaced by a folder" => {
            fs::remove_file(&it).unwrap();
            fs::create_dir(&it).unwrap();
            write(&it.join("in"), side);
        }
        "replaced by another file" => {
            write(&folder.join("its"), side);
            fs::rename(folder.join("its"), &it).unwrap();
        }
        "replaced by a file" => {
            fs::remove_dir_all(&it).unwrap();
            write(&it, side);
        }
        "what is in it moved out" => fs::rename(&inside, folder.join("out")).unwrap(),
        "another one moved into it" => fs::rename(folder.join("other"), it.join("other")).unwrap(),
        _ => unreachable!("{what}"),
    }
}

/// What is in a folder: of files the text, of folders nothing.
fn tree(folder: &Path) -> BTreeMap<String, Option<String>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            match path.is_dir() {
                true => {
                    found.insert(name, None);
                    open.push(path);
                }
                false => drop(found.insert(name, Some(fs::read_to_string(&path).unwrap()))),
            }
        }
    }
    found
}

/// A case: what the volume does, what the fork does, and the folder in which they do it.
fn cases(acts: &'static [&'static str]) -> Vec<(&'static str, &'static str, String)> {
    let pair = |here: &'static str| acts.iter().map(move |there| (here, *there));
    let all = acts.iter().flat_map(|here| pair(here)).enumerate();
    all.map(|(number, (here, there))| (here, there, format!("case{number:02}"))).collect()
}

/// Whether both can be put together: one has done nothing, or both the same.
fn fits(here: &str, there: &str) -> bool {
    let in_it = ["what is in it moved out", "another one moved into it"];
    here == "kept"
        || there == "kept"
        || (here == there && ["renamed alike", "removed"].contains(&here))
        || (in_it.contains(&here) && in_it.contains(&there))
}

fn merged(acts: &'static [&'static str], is_folder: bool, is_whole: bool) {
    let (farm, mount) = Farm::mounted("v");
    let make = |folder: &Path| {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("other"), "other").unwrap();
        let it = folder.join("it");
        let file = if is_folder { it.join("in") } else { it.clone() };
        if is_folder {
            fs::create_dir(&it).unwrap();
        }
        fs::write(file, "it").unwrap();
    };
    for (.., folder) in cases(acts) {
        make(&mount.join(&folder));
    }
    fs::write(mount.join("linked"), "linked").unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@base"]));
    run(&mut farm.ask(["fork", "v@base", "all"]));
    run(&mut farm.ask(["fork", "v@base", "fit"]));
    let (all, fit) = (farm.mount("all", ""), farm.mount("fit", ""));
    let mut wanted = Vec::new();
    for (here, there, folder) in cases(acts) {
        act(&mount.join(&folder), here, "here");
        act(&all.join(&folder), there, "there");
        if fits(here, there) {
            act(&fit.join(&folder), there, "there");
            let reference = farm.dir().join(&folder);
            make(&reference);
            act(&reference, here, "here");
            if here != there {
                act(&reference, there, "there");
            }
            wanted.push((here, there, folder, tree(&reference)));
        }
    }
    if is_whole {
        for fork in [&all, &fit] {
            fs::hard_link(fork.join("linked"), fork.join("again")).unwrap();
        }
    }
    let merge = |fork: &str| {
        let mut command = farm.ask(["merge", fork]);
        command.arg("--cache").arg(farm.dir().join("cache"));
        command
    };
    let before = super::live::tree(mount.path());
    let (code, said) = run_failing(&mut merge("all"));
    assert_eq!(code, 9, "{said}");
    let is_told = |folder: &str| said.lines().any(|line| line.trim().starts_with(&format!("{folder}/")));
    for (here, there, folder) in cases(acts) {
        assert_eq!(is_told(&folder), !fits(here, there), "{here} here, {there} there: {said}");
    }
    assert_eq!(super::live::tree(mount.path()), before);
    run(&mut merge("fit"));
    for (here, there, folder, wanted) in &wanted {
        assert_eq!(&tree(&mount.join(folder)), wanted, "{here} here, {there} there");
    }
    assert_eq!(mount.join("again").exists(), is_whole);
    assert!(run(&mut merge("fit")).contains("nothing that v has not"));
}

#[test]
fn what_two_do_to_a_file_is_put_together_or_named() {
    merged(&ACTS, false, false);
}

#[test]
fn what_two_do_to_a_folder_is_put_together_or_named() {
    merged(&ACTS_OF_FOLDER, true, false);
}

/// When files with several names are among what differs, the whole trees are compared.
#[test]
fn what_two_do_is_put_together_or_named_also_where_whole_trees_are_compared() {
    merged(&ACTS, false, true);
    merged(&ACTS_OF_FOLDER, true, true);
}
