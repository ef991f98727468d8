//! Traces of real processes, a value a step: what is steady gives no alarm, and what ends is warned of in time. A script wrote them
//! (`docs/bench/monitor_check.py --write`); each line has a kind and the use after each step in KiB, of a limit of 600 MB.

use plimsoll_monitor::{Judgement, LimitedBy, Room, Sample, Thresholds, Unit, Watch};

const TRACES: &str = include_str!("traces.txt");
const LIMIT: u64 = 600_000_000;

/// What is said of each step of a trace.
fn judged(trace: &[u64]) -> Vec<Judgement> {
    let thresholds = Thresholds { target: 0.90, warning: 0.92, critical: 0.95, emergency: 0.97 };
    let mut watch = Watch::new(thresholds, Unit::Steps);
    let judge = |(step, kib): (usize, &u64)| {
        let used_bytes = kib * 1024;
        let sample = Sample {
            anonymous_bytes: used_bytes,
            room: Some(Room { limit_bytes: LIMIT, used_bytes, limited_by: LimitedBy::Asked }),
            ..Sample::default()
        };
        watch.judge(step as f64, &sample)
    };
    trace.iter().enumerate().map(judge).collect()
}

fn traces(kind: &str) -> Vec<Vec<u64>> {
    let own = TRACES.lines().filter_map(|line| line.strip_prefix(kind)?.strip_prefix(' '));
    own.map(|line| line.split(' ').map(|kib| kib.parse().unwrap()).collect()).collect()
}

#[test]
fn what_is_steady_gives_no_alarm() {
    let traces = traces("steady");
    assert!(traces.len() >= 100, "{}", traces.len());
    for (number, trace) in traces.iter().enumerate() {
        for (step, judged) in judged(trace).into_iter().enumerate() {
            assert_eq!((judged.forecast, judged.leak), (None, None), "trace {number}, step {step}");
        }
    }
}

/// Two of the thirty live for about fifty steps and swing by a third of their use: four values for each of the twelve phases are too few
/// there. The monitor itself takes several samples a step.
#[test]
fn what_ends_is_warned_of_ten_steps_before() {
    let traces = traces("ends");
    let warned = |trace: &&Vec<u64>| {
        let first = judged(trace).iter().position(|judged| judged.forecast.is_some());
        first.is_some_and(|first| trace.len() - first >= 10)
    };
    assert_eq!((traces.iter().filter(warned).count(), traces.len()), (28, 30));
}
