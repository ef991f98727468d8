//! Which vector instructions this machine has. Found once, at start-up; kernels are chosen by it.

use std::fmt;

/// Instruction sets that kernels exist for, each including those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: any machine.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16,
    /// The same with AMX: products of tiles of bf16.
    Amx,
}

impl Isa {
    /// The best one that this machine has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512 && is_x86_feature_detected!("avx512bf16") {
                return if amx::is_usable() { Isa::Amx } else { Isa::Avx512Bf16 };
            }
            if avx512 {
                return Isa::Avx512;
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// All that this machine has, for tests of each.
    pub fn available() -> impl Iterator<Item = Isa> {
        let best = Isa::detect();
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx]
            .into_iter()
            .filter(move |isa| *isa <= best)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
            Isa::Avx512Bf16 => "AVX-512 with bf16",
            Isa::Amx => "AMX with bf16",
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;

    /// Whether the machine has tiles of 16 rows of 64 bytes with products of bf16, and the system lets this process use
    /// them. It is asked once: the permission is the process's, for threads to come too.
    pub(super) fn is_usable() -> bool {
        static USABLE: OnceLock<bool> = OnceLock::new();
        *USABLE.get_or_init(|| exists() && permit())
    }

    /// Intel's manual, volume 2, CPUID: leaf 7 for the instructions, leaf 0x1d for the tiles of palette 1.
    fn exists() -> bool {
        const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        // Since Rust 1.93 the function is safe.
        #[allow(unused_unsafe)]
        // SAFETY: every x86-64 has the instruction.
        let cpuid = |leaf, part| unsafe { __cpuid_count(leaf, part) };
        if cpuid(0, 0).eax < 0x1d || cpuid(7, 0).edx & BF16_AND_TILES != BF16_AND_TILES {
            return false;
        }
        let palette = cpuid(0x1d, 1);
        let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
        row_bytes == 64 && tiles >= 8 && rows >= 16
    }

    /// Linux gives the registers to processes that ask for them: its documentation, arch/x86/xstate.
    #[cfg(target_os = "linux")]
    fn permit() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: changes what the process may use, and no memory.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn permit() -> bool {
        false
    }
}
