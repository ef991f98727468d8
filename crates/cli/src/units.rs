//! Numbers as people read them.

/// A count with three figures: 134.5M.
pub fn count(n: u64) -> String {
    match n {
        0..1_000_000 => n.to_string(),
        1_000_000..1_000_000_000 => format!("{:.1}M", n as f64 / 1e6),
        _ => format!("{:.1}B", n as f64 / 1e9),
    }
}

/// A duration for people.
pub fn seconds(s: f64) -> String {
    match s {
        s if s < 1.0 => format!("{:.0} ms", 1000.0 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
