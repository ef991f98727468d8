//! `planning`: what the planner looks for, and among what.

use super::section::section;
use super::value::choice;

section! {
    /// What the planner looks for, and among what.
    pub struct PlanningConfig at "planning" {
        /// What the best of all settings is searched for that the configuration leaves open. The last four are answered by plimsoll
        /// plan alone; elsewhere they mean fastest.
        goal: Goal, "fastest where quality is set; else the fastest of a short list";
        /// What may be chosen on the way: what changes no bit but the order of sums, besides what is published to train as well,
        /// or anything.
        quality: Quality, "lossless where goal is set";
    }
}

choice! {
    /// What a search looks for.
    pub enum Goal {
        /// The shortest step under the load line.
        Fastest = "fastest",
        /// The least memory under the line.
        LeastMemory = "least_memory",
        /// The longest sequence that fits, and the fastest step with it.
        LongestSequence = "longest_sequence",
        /// The largest micro-batch that fits, and the fastest step with it.
        LargestBatch = "largest_batch",
        /// The device of the catalogue with the least memory that a step fits, and the fastest step on it.
        SmallestDevice = "smallest_device",
        /// The device of the catalogue on which a token costs least.
        Cheapest = "cheapest",
    }
}

choice! {
    /// What a search may choose.
    pub enum Quality {
        /// What changes no bit, or the order of sums alone. Precision is f32, or what the configuration says.
        Lossless = "lossless",
        /// Besides, what is published to train as well.
        Proven = "proven",
        /// Besides, everything that there is.
        Anything = "anything",
    }
}

impl PartialOrd for Quality {
    fn partial_cmp(&self, other: &Quality) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quality {
    /// What loses less comes first.
    fn cmp(&self, other: &Quality) -> std::cmp::Ordering {
        (*self as u8).cmp(&(*other as u8))
    }
}
