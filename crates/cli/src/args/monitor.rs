//! The flags of `monitor`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args};
use plimsoll_memory::ByteSize;
use plimsoll_plan::config::ThresholdProfile;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("watched").required(true).multiple(true).args(["pid", "cgroup", "command", "gpu", "post_mortem"])))]
pub struct MonitorArgs {
    /// Watch this process and its descendants
    #[arg(long, value_name = "N", conflicts_with_all = ["cgroup", "command"])]
    pub pid: Option<u32>,
    /// Watch this memory control group: its folder below /sys/fs/cgroup
    #[arg(long, value_name = "PATH", conflicts_with = "command")]
    pub cgroup: Option<PathBuf>,
    /// Start this command by the shell and watch it; its exit status becomes that of the monitor
    #[arg(long, value_name = "COMMAND")]
    pub command: Option<String>,
    /// Watch these GPUs as well, by their numbers, for example 0 or 0,1
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub gpu: Vec<u32>,
    /// Say after the end of a run what ended it, what grew, since when, and what would have fitted: the folder of a run, or what
    /// --record wrote
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["pid", "cgroup", "command", "gpu"])]
    pub post_mortem: Option<PathBuf>,
    /// Time from one sample to the next: 0.5, 2s or 100ms
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = interval)]
    pub interval: Duration,
    /// Stop after this time
    #[arg(long, value_name = "TIME", value_parser = interval)]
    pub duration: Option<Duration>,
    /// Memory that may be used, for example 24GiB; by default what the container, the machine or the GPU allows, whichever is nearest
    #[arg(long, value_name = "SIZE", value_parser = limit)]
    pub limit: Option<ByteSize>,
    /// Thresholds: aggressive, balanced or conservative
    #[arg(long, value_name = "NAME", default_value = "balanced", value_parser = profile)]
    pub profile: ThresholdProfile,
    /// Share of the limit that use should stay below
    #[arg(long, value_name = "SHARE")]
    pub target_utilization: Option<f64>,
    /// Share of the limit from which on a warning is given
    #[arg(long, value_name = "SHARE")]
    pub warning_threshold: Option<f64>,
    /// Share of the limit that is critical
    #[arg(long, value_name = "SHARE")]
    pub critical_threshold: Option<f64>,
    /// Share of the limit that is an emergency
    #[arg(long, value_name = "SHARE")]
    pub emergency_threshold: Option<f64>,
    /// Run this command by the shell each time that memory becomes critical; PLIMSOLL_STATUS, PLIMSOLL_PID, PLIMSOLL_USED_BYTES and
    /// PLIMSOLL_LIMIT_BYTES are in its environment
    #[arg(long, value_name = "COMMAND")]
    pub on_critical: Option<String>,
    /// Send this signal to the watched process each time that memory becomes critical: USR1, TERM or another
    #[arg(long, value_name = "SIGNAL", conflicts_with = "cgroup", value_parser = signal)]
    pub signal: Option<i32>,
    /// Count in steps instead of seconds: each line that this file gets is one, for example a log or metrics.jsonl
    #[arg(long, value_name = "FILE")]
    pub steps: Option<PathBuf>,
    /// Append every sample to this file, a line of JSON each
    #[arg(long, value_name = "FILE.jsonl")]
    pub log: Option<PathBuf>,
    /// Keep the last minutes in this file, which outlives everything; --post-mortem reads it
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Serve the last sample as Prometheus reads it: a port of 127.0.0.1, or an address and a port
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub prometheus: Option<SocketAddr>,
    /// Print a line of JSON for each sample, a last one for leaks, and nothing else
    #[arg(long)]
    pub json: bool,
}

fn limit(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => {
            Err("a limit is more than nothing; leave it out for what the system allows".to_owned())
        }
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// A time: `0.5`, `2s`, `100ms`.
fn interval(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let (number, scale) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s').unwrap_or(text), 1.0),
    };
    let seconds = number.trim().parse::<f64>().ok().map(|number| number * scale);
    let seconds = seconds.filter(|seconds| (1e-3..=1e6).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "write for example 0.5, 2s or 100ms, at least 1ms".to_owned())
}

fn profile(text: &str) -> Result<ThresholdProfile, String> {
    let found = ThresholdProfile::ALL.iter().find(|profile| profile.name() == text);
    found.copied().ok_or_else(|| "write aggressive, balanced or conservative".to_owned())
}

/// A signal by its name, with or without SIG, or by its number.
fn signal(text: &str) -> Result<i32, String> {
    use signal_hook::consts as all;
    let names = [
        ("HUP", all::SIGHUP),
        ("INT", all::SIGINT),
        ("QUIT", all::SIGQUIT),
        ("KILL", all::SIGKILL),
        ("USR1", all::SIGUSR1),
        ("USR2", all::SIGUSR2),
        ("TERM", all::SIGTERM),
        ("CONT", all::SIGCONT),
        ("STOP", all::SIGSTOP),
    ];
    let upper = text.trim().to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let known = |number: &i32| names.iter().any(|(_, own)| own == number);
    let found = names.iter().find(|(own, _)| *own == name).map(|(_, number)| *number);
    found.or_else(|| name.parse().ok().filter(known)).ok_or_else(|| {
        let names: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
        format!("write one of {}", names.join(", "))
    })
}

/// A port of the loopback, or an address with its port.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.parse::<u16>() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    text.parse().map_err(|_| "write a port, or an address and a port such as 127.0.0.1:9400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_signals_and_addresses_are_read() {
        let seconds = |text: &str| interval(text).map(|time| time.as_secs_f64()).ok();
        assert_eq!(
            ["0.5", "2s", "100ms", "0", "-1s", "x", "1e9"].map(seconds),
            [Some(0.5), Some(2.0), Some(0.1), None, None, None, None]
        );
        assert_eq!(
            ["USR1", "sigterm", "9", "99", "x"].map(|text| signal(text).ok()),
            [Some(10), Some(15), Some(9), None, None]
        );
        assert_eq!(address("9400").unwrap().to_string(), "127.0.0.1:9400");
        assert_eq!(address("0.0.0.0:80").unwrap().to_string(), "0.0.0.0:80");
        assert!(address("here").is_err() && address("70000").is_err());
        assert!(profile("balanced").is_ok() && profile("bold").is_err());
    }
}
