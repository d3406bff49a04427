//! Each rule that is left out is noticed: the seeds of the table in `README.md` fail without it, and not with it.

use hayloft_sim::{Config, Rule, run};

/// Rules and seeds, by the lines of the table.
fn recorded() -> Vec<(String, Vec<u64>)> {
    let lines = include_str!("../README.md").lines();
    let cells = lines.filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` |"));
    cells
        .filter_map(|(rule, rest)| {
            let (_, seeds) = rest.rsplit_once('|')?;
            let seeds = seeds.split(',').map(|seed| seed.trim().parse()).collect::<Result<_, _>>().ok()?;
            Some((rule.to_owned(), seeds))
        })
        .collect()
}

#[test]
fn every_broken_rule_is_noticed() {
    let recorded = recorded();
    for (name, rule) in Rule::ALL {
        let seeds = recorded.iter().find(|(of, _)| of == name).map(|(_, seeds)| seeds.as_slice());
        let seeds = seeds.unwrap_or_else(|| panic!("{name} has no seeds in README.md"));
        assert!(!seeds.is_empty());
        for seed in seeds {
            let config = Config { seed: *seed, ops: 120, broken: Some(rule), trace: false };
            assert!(run(config).failure.is_some(), "{name} is not noticed with seed {seed}");
            let whole = run(Config { broken: None, ..config });
            assert!(whole.failure.is_none(), "seed {seed}: {:?}", whole.failure.map(|failure| failure.what));
        }
    }
    assert_eq!(recorded.len(), Rule::ALL.len(), "a line of the table is no rule");
}
