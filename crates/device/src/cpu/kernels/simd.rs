//! One kernel body, compiled for each instruction set and chosen at run time.

use crate::cpu::Isa;

/// An instruction set that this machine has: the proof that compiled-for-it code may be called.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Simd(Isa);

impl Simd {
    /// `isa`, or the best that this machine has where it lacks that one.
    pub fn new(isa: Isa) -> Simd {
        Simd(isa.min(Isa::detect()))
    }

    pub fn isa(self) -> Isa {
        self.0
    }
}

/// Whether plain code has a fused multiply-add in hardware; where it has none, `f32::mul_add` is a slow library call.
pub(super) const PORTABLE_FMA: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// a * b + c, with one rounding where `FMA`.
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Accumulators of a sum: its order is fixed, and wide enough for any vector unit.
pub(super) const LANES: usize = 32;

/// Adds the lanes up pairwise.
///
/// A call, for the compiler then keeps the lanes of the loops before it in whole vectors: it has to store them in order.
#[inline(never)]
pub(super) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let mut sums = [0.0; 8];
    for i in 0..8 {
        sums[i] = (lanes[i] + lanes[i + 16]) + (lanes[i + 8] + lanes[i + 24]);
    }
    let mut halves = [0.0; 4];
    for i in 0..4 {
        halves[i] = sums[i] + sums[i + 4];
    }
    (halves[0] + halves[2]) + (halves[1] + halves[3])
}

/// The largest of the lanes, none of which is NaN. A call, as above.
#[inline(never)]
pub(super) fn max_of_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        let (lower, upper) = lanes.split_at_mut(width);
        for (lane, other) in lower.iter_mut().zip(upper) {
            *lane = if *other > *lane { *other } else { *lane };
        }
        width /= 2;
    }
    lanes[0]
}

/// Declares a function `name(simd, arguments)` that runs `body::<FMA>(arguments)` compiled for the instruction set.
///
/// `body` must be `#[inline(always)]`, as must all that it calls: only what is inlined is compiled for the set.
macro_rules! per_isa {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident $(<$generic:ident: $bound:path>)? ($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)?
            = $body:ident
    ) => {
        $(#[$meta])*
        $vis fn $name $(<$generic: $bound>)? (simd: $crate::cpu::kernels::Simd, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::Isa;

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512 $(<$generic: $bound>)? ($($arg: $type),*) $(-> $result)? {
                    $body::<$($generic,)? true>($($arg),*)
                }

                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2 $(<$generic: $bound>)? ($($arg: $type),*) $(-> $result)? {
                    $body::<$($generic,)? true>($($arg),*)
                }

                match simd.isa() {
                    // SAFETY: a `Simd` is only made of an instruction set that this machine has.
                    Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return unsafe { avx512 $(::<$generic>)? ($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2 $(::<$generic>)? ($($arg),*) },
                    Isa::Portable => {}
                }
            }
            let _ = simd;
            $body::<$($generic,)? { $crate::cpu::kernels::simd::PORTABLE_FMA }>($($arg),*)
        }
    };
}

pub(super) use per_isa;
