//! Medians and ratios, as Markdown tables.

use std::time::Duration;

use crate::{Placement, Sample, TRANSPORTS, Transport, Workload};

/// Prints one table per workload and placement. `samples` is indexed by these two, then by transport.
pub(crate) fn print(workloads: &[Workload], samples: &[Vec<Vec<Vec<Sample>>>]) {
    for (workload, samples) in workloads.iter().zip(samples) {
        for (placement, samples) in Placement::ALL.iter().zip(samples) {
            let rounds = samples[0].len();
            println!("\n**{}; {}** (medians of {rounds}, per message)\n", workload.name, placement.label());
            print_table(workload, samples);
        }
    }
}

fn print_table(workload: &Workload, samples: &[Vec<Sample>]) {
    println!("| transport | time | range | MB/s | ratio | CPU, both ends | ratio |");
    println!("|---|---|---|---|---|---|---|");
    for (t, transport) in TRANSPORTS.iter().enumerate() {
        let (elapsed, cpu) = sorted(&samples[t]);
        let ratios = match transport {
            Transport::FramedAsync | Transport::FramedThread => ("".into(), "".into()),
            Transport::GrpcAsync | Transport::GrpcThread => {
                let (base_elapsed, base_cpu) = sorted(&samples[t - 1]);
                (ratio(median(&elapsed), median(&base_elapsed)), ratio(median(&cpu), median(&base_cpu)))
            }
        };
        println!(
            "| {} | {:.2} us | {:.2}-{:.2} | {:.0} | {} | {:.2} us | {} |",
            transport.label(),
            us(median(&elapsed)),
            us(elapsed[0]),
            us(*elapsed.last().expect("a round")),
            workload.payload_bytes as f64 / us(median(&elapsed)),
            ratios.0,
            us(median(&cpu)),
            ratios.1,
        );
    }
}

fn sorted(samples: &[Sample]) -> (Vec<Duration>, Vec<Duration>) {
    let mut elapsed: Vec<_> = samples.iter().map(|s| s.elapsed).collect();
    let mut cpu: Vec<_> = samples.iter().map(|s| s.cpu).collect();
    elapsed.sort();
    cpu.sort();
    (elapsed, cpu)
}

fn median(sorted: &[Duration]) -> Duration {
    sorted[sorted.len() / 2]
}

fn us(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn ratio(a: Duration, base: Duration) -> String {
    format!("{:.2}", a.as_secs_f64() / base.as_secs_f64())
}
