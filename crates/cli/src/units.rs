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

/// How long ago something was, in the largest unit.
pub fn ago(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / (24 * 3600));
    let plural = |n: u64, unit: &str| format!("{n} {unit}{} ago", if n == 1 { "" } else { "s" });
    match (days, hours, minutes) {
        (0, 0, 0) => "just now".to_owned(),
        (0, 0, minutes) => plural(minutes, "minute"),
        (0, hours, _) => plural(hours, "hour"),
        (days, ..) => plural(days, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::ago;

    #[test]
    fn ages_are_in_the_largest_unit() {
        let ages = [0, 59, 60, 7199, 7200, 86_399, 86_400, 40 * 86_400].map(ago);
        let hours = ["1 hour ago", "2 hours ago", "23 hours ago"];
        assert_eq!(ages[..3], ["just now", "just now", "1 minute ago"]);
        assert_eq!(ages[3..6], hours);
        assert_eq!(ages[6..], ["1 day ago", "40 days ago"]);
    }
}
