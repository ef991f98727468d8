//! The processor: its name, the cores that this process may use, and its instruction sets in words.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use super::cgroup::{self, Cgroups};
use super::files::{SystemFiles, core_list, field};

/// The processor, as far as this process may use it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Cpu {
    /// What its maker calls it.
    pub name: Option<String>,
    /// The architecture that this program was built for: `x86_64`, `aarch64`.
    pub architecture: &'static str,
    /// Logical cores of the machine that are switched on.
    pub logical_cores: Option<usize>,
    /// Logical cores that the scheduler may put this process on (its affinity).
    pub allowed_cores: Option<usize>,
    /// Physical cores among those.
    pub physical_cores: Option<usize>,
    /// Processor time that the container may use, in cores.
    pub quota_cores: Option<f64>,
    /// How many threads can compute at once at full speed: a physical core each, and no more than the quota.
    pub threads: usize,
    /// Instruction sets that matter to numerical kernels, in words.
    pub instruction_sets: Vec<&'static str>,
}

/// Flags of `/proc/cpuinfo`, on x86-64 and on AArch64, and what to call them.
const INSTRUCTION_SETS: &[(&str, &str)] = &[
    ("sse4_2", "SSE4.2"),
    ("avx", "AVX"),
    ("fma", "FMA"),
    ("f16c", "F16C"),
    ("avx2", "AVX2"),
    ("avx_vnni", "AVX-VNNI"),
    ("avx512f", "AVX-512 F"),
    ("avx512bw", "AVX-512 BW"),
    ("avx512dq", "AVX-512 DQ"),
    ("avx512vl", "AVX-512 VL"),
    ("avx512_vnni", "AVX-512 VNNI"),
    ("avx512_bf16", "AVX-512 BF16"),
    ("avx512_fp16", "AVX-512 FP16"),
    ("amx_tile", "AMX"),
    ("amx_int8", "AMX INT8"),
    ("amx_bf16", "AMX BF16"),
    ("asimd", "NEON"),
    ("asimdhp", "NEON FP16"),
    ("asimddp", "NEON dot product"),
    ("bf16", "BF16"),
    ("i8mm", "I8MM"),
    ("sve", "SVE"),
    ("sve2", "SVE2"),
    ("sme", "SME"),
];

impl Cpu {
    pub(super) fn under(files: &SystemFiles) -> Cpu {
        let read = |path: &str| files.read(Path::new(path));
        let info = read("/proc/cpuinfo").unwrap_or_default();
        let allowed = read("/proc/self/status")
            .and_then(|status| Some(core_list(field(&status, "Cpus_allowed_list")?)))
            .filter(|cores| !cores.is_empty());
        let physical_cores = allowed.as_ref().and_then(|allowed| {
            let siblings = allowed.iter().map(|core| {
                read(&format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"))
            });
            siblings.collect::<Option<BTreeSet<String>>>().map(|cores| cores.len())
        });
        let allowed_cores = allowed.map(|cores| cores.len());
        let quota_cores = Cgroups::under(files).and_then(|cgroups| cgroup::cpu_quota(files, &cgroups));
        let cores = physical_cores
            .or(allowed_cores)
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get));
        Cpu {
            name: name(&info).map(str::to_owned),
            architecture: std::env::consts::ARCH,
            logical_cores: read("/sys/devices/system/cpu/online")
                .map(|online| core_list(&online).len())
                .filter(|cores| *cores > 0),
            allowed_cores,
            physical_cores,
            quota_cores,
            threads: quota_cores.map_or(cores, |quota| cores.min(quota as usize)).max(1),
            instruction_sets: instruction_sets(&info),
        }
    }
}

fn name(cpuinfo: &str) -> Option<&str> {
    let keys = ["model name", "cpu model", "Model", "Hardware", "uarch", "cpu"];
    keys.iter().find_map(|key| field(cpuinfo, key)).filter(|name| !name.is_empty())
}

fn instruction_sets(cpuinfo: &str) -> Vec<&'static str> {
    let flags: BTreeSet<&str> = ["flags", "Features"]
        .iter()
        .filter_map(|key| field(cpuinfo, key))
        .flat_map(str::split_whitespace)
        .collect();
    INSTRUCTION_SETS.iter().filter(|(flag, _)| flags.contains(flag)).map(|(_, words)| *words).collect()
}

impl fmt::Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU        {} ({})", self.name.as_deref().unwrap_or("unknown"), self.architecture)?;
        write!(f, "\n           ")?;
        match (self.allowed_cores, self.logical_cores) {
            (Some(allowed), Some(logical)) if allowed < logical => {
                write!(f, "{allowed} of {logical} logical cores allowed")?;
            }
            (Some(cores), _) | (None, Some(cores)) => write!(f, "{cores} logical cores")?,
            (None, None) => write!(f, "unknown number of cores")?,
        }
        if let Some(physical) = self.physical_cores {
            write!(f, " on {physical} physical")?;
        }
        if let Some(quota) = self.quota_cores {
            write!(f, ", quota of {quota:.2} cores")?;
        }
        let plural = if self.threads == 1 { "" } else { "s" };
        write!(f, ": {} thread{plural}", self.threads)?;
        if !self.instruction_sets.is_empty() {
            write!(f, "\n           {}", self.instruction_sets.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_instruction_sets_are_read() {
        let x86 = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse4_2 avx avx2 avx512f avx512_bf16 amx_tilex\n\nprocessor\t: 1\n";
        assert_eq!(name(x86), Some("AMD EPYC"));
        assert_eq!(instruction_sets(x86), ["SSE4.2", "AVX", "AVX2", "AVX-512 F", "AVX-512 BF16"]);

        let raspberry = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 asimddp\nCPU part\t: 0xd0b\n\nModel\t\t: Raspberry Pi 5\n";
        assert_eq!(name(raspberry), Some("Raspberry Pi 5"));
        assert_eq!(instruction_sets(raspberry), ["NEON", "NEON dot product"]);

        assert_eq!(name(""), None);
        assert!(instruction_sets("flags").is_empty());
    }
}
