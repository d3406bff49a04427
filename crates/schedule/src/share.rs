//! Weighted max-min shares, as numbers: what status shows and what tests compare with.

/// What each of several parties gets of a capacity: nobody more than he wants, and who gets less than he wants gets no
/// less for his weight than any other. `parties` are (weight, wanted).
pub fn max_min(capacity: f64, parties: &[(f64, f64)]) -> Vec<f64> {
    let mut given = vec![0.0; parties.len()];
    let mut left = capacity;
    // Who is content with the least for his weight is filled first; the rest divides what is left.
    let mut order: Vec<usize> = (0..parties.len()).filter(|at| parties[*at].0 > 0.0).collect();
    order.sort_by(|a, b| (parties[*a].1 / parties[*a].0).total_cmp(&(parties[*b].1 / parties[*b].0)));
    let mut weights: f64 = order.iter().map(|at| parties[*at].0).sum();
    for at in order {
        let (weight, wanted) = parties[at];
        given[at] = wanted.min(left * weight / weights);
        left -= given[at];
        weights -= weight;
    }
    given
}

/// Jain's fairness index of what parties got for their weights: 1 when all got the same, 1/n when one got all.
pub fn jain(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(sum, squares), v| (sum + v, squares + v * v));
    if squares == 0.0 { 1.0 } else { sum * sum / (values.len() as f64 * squares) }
}
