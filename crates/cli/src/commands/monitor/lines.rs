//! What the monitor says: a sample as JSON and as a line for people, and the report on leaks.

use plimsoll_memory::ByteSize;
use plimsoll_monitor::{Judgement, Leak, Sample, Status, Unit};
use serde_json::{Map, Value, json};

use crate::units::seconds;

/// A sample with what is said of it.
pub fn json_of(sample: &Sample, judged: &Judgement, unit: Unit, step: Option<u64>) -> Value {
    let mut document = json!(sample);
    let Value::Object(map) = &mut document else { return document };
    if map.get("limit_bytes").is_none() {
        map.insert("limit_bytes".to_owned(), Value::Null);
    }
    if let Some(step) = step {
        map.insert("step".to_owned(), step.into());
    }
    map.insert("status".to_owned(), json!(judged.status));
    map.insert("utilization".to_owned(), json!(judged.utilization));
    let remaining = json!(judged.forecast.map(|forecast| forecast.remaining));
    map.insert(format!("forecast_{}s", unit.name()), remaining);
    if unit == Unit::Steps {
        map.insert("forecast_seconds".to_owned(), Value::Null);
    }
    let growing = judged.growing.iter().map(|growing| {
        let mut entry = json!(growing.quantity);
        if let Value::Object(entry) = &mut entry {
            entry.insert(format!("bytes_per_{}", unit.name()), json!(growing.rate.round()));
        }
        entry
    });
    map.insert("growing".to_owned(), growing.collect());
    if let Some(leak) = &judged.leak {
        map.insert("leak_found".to_owned(), leak_of(leak));
    }
    document
}

/// The last line.
pub fn leak_json(leak: Option<&Leak>, unit: Unit) -> Value {
    let none = || json!({ "suspected": false, format!("bytes_per_{}", unit.name()): 0, "confidence": 0 });
    json!({ "leak": leak.map_or_else(none, leak_of) })
}

fn leak_of(leak: &Leak) -> Value {
    let mut map = Map::new();
    map.insert("suspected".to_owned(), true.into());
    map.insert(format!("bytes_per_{}", leak.unit.name()), json!(leak.rate.round()));
    map.insert("confidence".to_owned(), json!(leak.confidence));
    if let Value::Object(what) = json!(leak.quantity) {
        map.extend(what);
    }
    map.into()
}

/// A sample for people.
pub fn line(sample: &Sample, judged: &Judgement, unit: Unit, step: Option<u64>) -> String {
    let mut text = step.map_or(String::new(), |step| format!("[Step {step}] "));
    text.push_str(&match sample.room {
        Some(room) => format!(
            "Memory: {} of {} ({:.0}%) of {}",
            ByteSize(room.used_bytes),
            ByteSize(room.limit_bytes),
            100.0 * room.share(),
            room.limited_by.words()
        ),
        None => "Memory".to_owned(),
    });
    if !sample.processes.is_empty() || sample.cgroup.is_some() {
        text.push_str(&format!(
            "; resident {}: anonymous {}, files {}",
            ByteSize(sample.rss_bytes),
            ByteSize(sample.anonymous_bytes),
            ByteSize(sample.file_bytes)
        ));
    }
    if sample.swap_bytes > 0 {
        text.push_str(&format!(", swap {}", ByteSize(sample.swap_bytes)));
    }
    for gpu in &sample.gpu {
        let (used, total) = (ByteSize(gpu.used_bytes), ByteSize(gpu.total_bytes));
        text.push_str(&format!("; GPU {}: {used} of {total}", gpu.index));
    }
    text.push_str(&format!(", Status: {}", judged.status));
    if let Some(forecast) = judged.forecast.filter(|_| judged.status != Status::Emergency) {
        text.push_str(&format!(" - the line is reached in {}", time(forecast.remaining, unit)));
    }
    if let Some(growing) = judged.growing.first() {
        text.push_str(&format!("; {} grows by {}", growing.quantity, rate(growing.rate, unit)));
    }
    text
}

/// A leak for people.
pub fn leak_line(leak: Option<&Leak>) -> String {
    match leak {
        Some(leak) => format!(
            "leak suspected: {} grows by {} from each phase to the next (confidence {:.2} %)",
            leak.quantity,
            rate(leak.rate, leak.unit),
            100.0 * leak.confidence
        ),
        None => "no leak: nothing grew steadily".to_owned(),
    }
}

fn time(remaining: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => seconds(remaining),
        Unit::Steps => format!("{remaining:.0} steps"),
    }
}

fn rate(rate: f64, unit: Unit) -> String {
    format!("{} a {}", ByteSize(rate.round() as u64), unit.name())
}

#[cfg(test)]
mod tests {
    use plimsoll_monitor::{Forecast, Growing, LimitedBy, Quantity, Room};

    use super::*;

    fn judged() -> Judgement {
        Judgement {
            status: Status::Critical,
            has_risen: true,
            utilization: Some(0.95),
            forecast: Some(Forecast { remaining: 12.0, rate: 1e6 }),
            growing: vec![Growing { quantity: Quantity::Gpu { index: 1 }, rate: 1048576.0 }],
            leak: None,
        }
    }

    #[test]
    fn a_sample_is_said_in_a_line() {
        let room = Room { limit_bytes: 1 << 30, used_bytes: 1020054733, limited_by: LimitedBy::Container };
        let sample = Sample { room: Some(room), ..Sample::default() };
        assert_eq!(
            line(&sample, &judged(), Unit::Steps, Some(300)),
            "[Step 300] Memory: 972.8 MiB of 1.00 GiB (95%) of the container's limit, Status: critical - the line is reached in 12 steps; GPU 1 grows by 1.00 MiB a step"
        );
        let json = json_of(&sample, &judged(), Unit::Seconds, None);
        assert_eq!((&json["forecast_seconds"], &json["status"]), (&json!(12.0), &json!("critical")));
        assert_eq!(json["growing"], json!([{"what": "gpu", "index": 1, "bytes_per_second": 1048576.0}]));
        assert!(json_of(&Sample::default(), &judged(), Unit::Seconds, None)["limit_bytes"].is_null());
    }

    #[test]
    fn a_leak_is_said_with_its_unit() {
        let leak = Leak {
            quantity: Quantity::Anonymous,
            rate: 1e6,
            confidence: 0.999,
            unit: Unit::Steps,
            spread: 0.1,
        };
        let json = leak_json(Some(&leak), Unit::Steps);
        assert_eq!(
            json,
            json!({"leak": {"suspected": true, "bytes_per_step": 1e6, "confidence": 0.999, "what": "anonymous"}})
        );
        assert_eq!(leak_json(None, Unit::Seconds)["leak"]["suspected"], false);
        assert!(leak_line(Some(&leak)).contains("976.6 KiB a step"), "{}", leak_line(Some(&leak)));
    }
}
