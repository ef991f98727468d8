//! Sums that do not depend on the order of what is added.

/// Bits of a digit.
const DIGIT_BITS: u32 = 32;
/// Digits: from 2^-384, below the least square of an f32, to far above the sum of all that a device can hold.
const DIGITS: usize = 22;
/// The power of two of the lowest bit.
const LOWEST: i32 = -384;
/// Additions after which digits are carried, well before one could overflow.
const MOST_ADDITIONS: u32 = 1 << 30;

/// The exact sum of squares of f32 values, or of sums of them, as a long number in fixed point (Kulisch). Whatever the order
/// and however the terms are divided between threads or ranks: the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExactSum {
    digits: [i64; DIGITS],
    /// Additions since digits were carried.
    additions: u32,
    /// Whether something was added that is not finite, or too large or too small to be such a sum.
    spoiled: bool,
}

impl ExactSum {
    /// Bytes of one, as [`write`](Self::write) writes it.
    pub const BYTES: usize = (DIGITS + 1) * 8;

    /// Nothing yet.
    pub const ZERO: ExactSum = ExactSum { digits: [0; DIGITS], additions: 0, spoiled: false };

    /// Adds a number that is 0 or more.
    pub fn add(&mut self, value: f64) {
        let bits = value.to_bits();
        let exponent = (bits >> 52) as i32;
        if exponent == 0 && bits << 12 == 0 {
            return;
        }
        // The sign is among the bits of the exponent.
        let place = exponent - 1075 - LOWEST;
        let mantissa = bits << 12 >> 12 | 1 << 52;
        let (mantissa, place) = match u32::try_from(-place) {
            Ok(below) if below <= mantissa.trailing_zeros() => (mantissa >> below, 0),
            _ => (mantissa, place),
        };
        let Some(digits) = usize::try_from(place)
            .ok()
            .and_then(|place| self.digits.get_mut(place / DIGIT_BITS as usize..)?.first_chunk_mut::<3>())
        else {
            self.spoiled = true;
            return;
        };
        let wide = u128::from(mantissa) << (place as u32 % DIGIT_BITS);
        for (i, digit) in (0..).zip(digits) {
            *digit += i64::from((wide >> (i * DIGIT_BITS)) as u32);
        }
        self.additions += 1;
        if self.additions >= MOST_ADDITIONS {
            self.carry();
        }
    }

    /// Adds what another one holds.
    pub fn add_sum(&mut self, mut other: ExactSum) {
        other.carry();
        self.carry();
        self.digits.iter_mut().zip(other.digits).for_each(|(digit, other)| *digit += other);
        self.spoiled |= other.spoiled;
        self.carry();
    }

    /// Leaves every digit below 2^32.
    fn carry(&mut self) {
        let mut carried = 0;
        for digit in &mut self.digits {
            let sum = *digit + carried;
            (*digit, carried) = (sum & i64::from(u32::MAX), sum >> DIGIT_BITS);
        }
        self.spoiled |= carried != 0;
        self.additions = 0;
    }

    /// The sum, rounded to nearest; infinite if it was spoiled.
    pub fn value(mut self) -> f64 {
        self.carry();
        if self.spoiled {
            return f64::INFINITY;
        }
        let Some(highest) = self.digits.iter().rposition(|digit| *digit != 0) else { return 0.0 };
        let (low, high) = self.digits.split_at(highest.saturating_sub(3));
        let top = high.iter().take(4).rev().fold(0, |top, digit| top << DIGIT_BITS | *digit as u128);
        // What is below decides ties.
        let sticky = u128::from(low.iter().any(|digit| *digit != 0));
        (top | sticky) as f64 * 2f64.powi(LOWEST + (low.len() as u32 * DIGIT_BITS) as i32)
    }

    /// Writes it as bytes that add up by their words.
    pub fn write(mut self, out: &mut [u8]) {
        self.carry();
        let words = self.digits.iter().copied().chain([i64::from(self.spoiled)]);
        out.chunks_exact_mut(8).zip(words).for_each(|(out, word)| out.copy_from_slice(&word.to_ne_bytes()));
    }

    /// Reads what [`write`](Self::write) wrote.
    pub fn read(bytes: &[u8]) -> ExactSum {
        let mut sum = ExactSum::ZERO;
        let mut words = bytes.as_chunks::<8>().0.iter().map(|word| i64::from_ne_bytes(*word));
        sum.digits.iter_mut().zip(words.by_ref()).for_each(|(digit, word)| *digit = word);
        sum.spoiled = words.next().is_some_and(|spoiled| spoiled != 0);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(values: impl IntoIterator<Item = f64>) -> ExactSum {
        let mut sum = ExactSum::ZERO;
        values.into_iter().for_each(|value| sum.add(value));
        sum
    }

    #[test]
    fn no_order_and_no_division_changes_a_bit() {
        let values: Vec<f64> = (0..3000u64)
            .map(|i| f64::from((i * 7919 % 3001) as f32).powi(2) * 2f64.powi(i as i32 % 200 - 100))
            .collect();
        let whole = sum(values.iter().copied());
        let backwards = sum(values.iter().rev().copied());
        assert_eq!(whole.value().to_bits(), backwards.value().to_bits());
        for parts in [1, 7, 1000] {
            let mut all = ExactSum::ZERO;
            for part in values.chunks(parts).rev() {
                let mut bytes = [0; ExactSum::BYTES];
                sum(part.iter().copied()).write(&mut bytes);
                all.add_sum(ExactSum::read(&bytes));
            }
            assert_eq!(all.value().to_bits(), whole.value().to_bits());
        }
    }

    #[test]
    fn what_is_small_beside_the_sum_is_not_lost() {
        let tiny = 2f64.powi(-290);
        assert_eq!(sum([1e70, tiny]).value(), 1e70);
        let mut all = sum([2f64.powi(60), tiny]);
        all.add_sum(sum([2f64.powi(7)]));
        // Half of the last place, and a little more.
        assert_eq!(all.value(), 2f64.powi(60) + 256.0);
        // A tie is to even, but for what is below it.
        assert_eq!(sum([2f64.powi(53), 1.0]).value(), 2f64.powi(53));
        assert_eq!(sum([2f64.powi(53), 1.0, tiny]).value(), 2f64.powi(53) + 2.0);
        assert_eq!(sum([0.0, 0.0]).value(), 0.0);
        let least = f64::from(f32::from_bits(1)).powi(2);
        assert_eq!(sum([least; 3]).value(), 3.0 * least);
    }

    #[test]
    fn what_is_not_finite_spoils_a_sum() {
        for bad in [f64::INFINITY, f64::NAN, -1.0, 1e300] {
            let mut all = sum([1.0]);
            all.add_sum(sum([1.0, bad]));
            assert_eq!(all.value(), f64::INFINITY, "{bad}");
            let mut bytes = [0; ExactSum::BYTES];
            all.write(&mut bytes);
            assert_eq!(ExactSum::read(&bytes).value(), f64::INFINITY);
        }
        let most = f64::from(f32::MAX).powi(2);
        assert_eq!(sum([most; 4]).value(), 4.0 * most);
    }

    #[test]
    fn digits_are_carried_before_they_overflow() {
        let mut all = sum([1.5]);
        all.additions = MOST_ADDITIONS - 1;
        all.add(1.5);
        assert_eq!((all.additions, all.value()), (0, 3.0));
        // Doubled 60 times.
        for _ in 0..60 {
            all.add_sum(all);
        }
        assert_eq!(all.value(), 3.0 * 2f64.powi(60));
    }
}
