//! The dynamic 8-bit data types of bitsandbytes: 256 values, and the code of the nearest one.
//!
//! A decade of magnitudes, from one power of ten to the next, holds twice as many values as the one below it, the means
//! of neighbours in an even partition (Dettmers et al. 2022, section 2.2; `create_dynamic_map`).

/// Upper halves of an f32 below this are one bucket: magnitudes below 2^-24, smaller than half of any value.
const FIRST_BUCKET: u32 = (127 - 24) << 7;

/// Buckets of one sign: the upper halves of f32 from there to 1.
const BUCKETS: usize = 0x3f80 - FIRST_BUCKET as usize + 1;

/// Where the buckets of negative numbers begin.
const NEGATIVE: usize = 4096;

/// A data type of 256 values.
pub(super) struct DynamicMap {
    /// In rising order.
    values: [f32; 256],
    /// x has a code above i where it exceeds the i-th. Midpoints between neighbours go to the even code.
    thresholds: [f32; 256],
    /// The least code of the numbers with an upper half; at most one threshold lies among them.
    least: [u8; 2 * NEGATIVE],
    /// The largest code that a negative number may have: one decoded to 0 would lose its sign.
    last_negative: u8,
}

/// For values of either sign: -0.993 to 1, 0 at 127.
pub(super) static SIGNED: DynamicMap = DynamicMap::new(true);

/// For values that are not negative: 0 to 1.
pub(super) static UNSIGNED: DynamicMap = DynamicMap::new(false);

impl DynamicMap {
    const fn new(signed: bool) -> DynamicMap {
        let values = values(signed);
        let thresholds = thresholds(&values);
        let mut least = [0; 2 * NEGATIVE];
        let mut code = if signed { 127 } else { 0 };
        let mut bucket = 0;
        while bucket < BUCKETS {
            let smallest = if bucket == 0 { 0 } else { (FIRST_BUCKET + bucket as u32) << 16 };
            while f32::from_bits(smallest) > thresholds[code] {
                code += 1;
            }
            least[bucket] = code as u8;
            bucket += 1;
        }
        let mut code = 127;
        let mut bucket = 0;
        while signed && bucket < BUCKETS {
            let largest = ((FIRST_BUCKET + bucket as u32) << 16) | 0xffff;
            while code > 0 && -f32::from_bits(largest) <= thresholds[code - 1] {
                code -= 1;
            }
            least[NEGATIVE + bucket] = code as u8;
            bucket += 1;
        }
        DynamicMap { values, thresholds, least, last_negative: if signed { 126 } else { 255 } }
    }

    /// The value of a code.
    #[inline(always)]
    pub fn decode(&self, code: u8) -> f32 {
        self.values[usize::from(code)]
    }

    /// Where [`encode`](Self::encode) has to look for x, which is -1 to 1.
    #[inline(always)]
    pub fn bucket(x: f32) -> u16 {
        let bits = x.to_bits();
        let half = ((bits & 0x7fff_ffff) >> 16).clamp(FIRST_BUCKET, 0x3f80) - FIRST_BUCKET;
        (half | ((bits >> 31) << 12)) as u16
    }

    /// The code of the value nearest to x.
    #[inline(always)]
    pub fn encode(&self, x: f32, bucket: u16) -> u8 {
        let least = self.least[usize::from(bucket) % (2 * NEGATIVE)];
        let code = least + u8::from(x > self.thresholds[usize::from(least)]);
        if x.is_sign_negative() { code.min(self.last_negative) } else { code }
    }
}

/// The values, computed in f32 as the reference tables are.
const fn values(signed: bool) -> [f32; 256] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut values = [0.0; 256];
    let zero = if signed { 127 } else { 0 };
    values[255] = 1.0;
    let mut next = zero + 1;
    let mut decade = 0;
    while decade < 7 {
        let count = if signed { 1 << decade } else { 2 << decade };
        let mut i = 0;
        while i < count {
            let mean = (boundary(i, count) + boundary(i + 1, count)) / 2.0;
            let value = mean * POWERS[decade];
            values[next] = value;
            if signed {
                values[2 * zero - next] = -value;
            }
            next += 1;
            i += 1;
        }
        decade += 1;
    }
    values
}

/// The i-th of `count + 1` even steps from 0.1 to 1, reckoned from the nearer end.
const fn boundary(i: usize, count: usize) -> f32 {
    let step = (1.0f32 - 0.1) / count as f32;
    if i < count.div_ceil(2) { 0.1 + step * i as f32 } else { 1.0 - step * (count - i) as f32 }
}

const fn thresholds(values: &[f32; 256]) -> [f32; 256] {
    let mut thresholds = [f32::INFINITY; 256];
    let mut i = 0;
    while i < 255 {
        let middle = (values[i] + values[i + 1]) * 0.5;
        thresholds[i] = if i % 2 == 0 { middle } else { middle.next_down() };
        i += 1;
    }
    thresholds
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The code as bitsandbytes finds it: eight halvings, then the nearer of two neighbours.
    fn by_halving(values: &[f32; 256], x: f32) -> u8 {
        let (mut lower, mut pivot, mut upper) = (0usize, 127usize, 255usize);
        for step in [64, 32, 16, 8, 4, 2, 1] {
            if x > values[pivot] {
                lower = pivot;
                pivot += step;
            } else {
                upper = pivot;
                pivot -= step;
            }
        }
        let middle = |a: usize| (values[a] + values[pivot]) * 0.5;
        let code = if x > values[pivot] {
            if x > middle(upper) { upper } else { pivot }
        } else if x < middle(lower) {
            lower
        } else {
            pivot
        };
        code as u8
    }

    #[test]
    fn maps_are_the_reference_tables() {
        let text = include_str!("../../../../tests/fixtures/dynamic_maps.txt");
        for (map, line) in [&SIGNED, &UNSIGNED].into_iter().zip(text.lines()) {
            let bits: Vec<u32> = line.split(' ').map(|x| u32::from_str_radix(x, 16).unwrap()).collect();
            assert_eq!(map.values.map(f32::to_bits).to_vec(), bits);
        }
    }

    #[test]
    fn codes_are_those_of_the_binary_search() {
        for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
            let mut points: Vec<f32> = (0..=200_000).map(|i| i as f32 / 200_000.0).collect();
            points.extend((0..3000).map(|i| (0.99f32).powi(i)));
            for i in 0..255 {
                let middle = (map.values[i] + map.values[i + 1]) * 0.5;
                let near = [middle, middle.next_down(), middle.next_up(), map.values[i], map.values[i + 1]];
                points.extend(near.map(f32::abs));
            }
            points.retain(|x| *x <= 1.0);
            if signed {
                points.extend(points.clone().iter().map(|x| -x));
            }
            for x in points {
                let mut want = by_halving(&map.values, x);
                if signed && x.is_sign_negative() != map.values[usize::from(want)].is_sign_negative() {
                    want = if x > 0.0 { want.wrapping_add(1) } else { want.wrapping_sub(1) };
                }
                assert_eq!(map.encode(x, DynamicMap::bucket(x)), want, "{x:e} {signed}");
            }
        }
    }
}
