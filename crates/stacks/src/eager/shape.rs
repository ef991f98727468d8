//! Sizes and strides of a tensor: at most five dimensions, as attention over grouped heads needs.

/// The most dimensions.
const MOST: usize = 5;

/// Sizes, or strides, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    values: [u64; MOST],
    rank: usize,
}

impl Dims {
    /// From a list of at most five.
    pub fn new(values: &[u64]) -> Dims {
        let mut dims = Dims { values: [0; MOST], rank: values.len() };
        dims.values[..values.len()].copy_from_slice(values);
        dims
    }

    /// Strides of a contiguous tensor of these sizes.
    pub fn contiguous_strides(&self) -> Dims {
        let mut strides = *self;
        let mut stride = 1;
        for (place, size) in self.iter().enumerate().rev() {
            strides.values[place] = stride;
            stride *= (*size).max(1);
        }
        strides
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.iter().product()
    }

    /// Sizes of the result of an element-wise operation.
    pub fn broadcast(&self, other: &Dims) -> Dims {
        let (long, short) = if self.rank >= other.rank { (self, other) } else { (other, self) };
        let mut dims = *long;
        let ahead = long.rank - short.rank;
        for (place, size) in short.iter().enumerate() {
            let at = &mut dims.values[ahead + place];
            *at = if *at == 1 { *size } else { *at };
        }
        dims
    }

    /// With dimension `at` changed.
    pub fn with(mut self, at: usize, size: u64) -> Dims {
        self.values[at] = size;
        self
    }

    /// With two dimensions exchanged.
    pub fn swapped(mut self, a: usize, b: usize) -> Dims {
        self.values.swap(a, b);
        self
    }

    /// With a dimension put before `at`.
    pub fn inserted(&self, at: usize, size: u64) -> Dims {
        let mut values = self.to_vec();
        values.insert(at, size);
        Dims::new(&values)
    }

    /// With dimension `at` taken out.
    pub fn removed(&self, at: usize) -> Dims {
        let mut values = self.to_vec();
        values.remove(at);
        Dims::new(&values)
    }

    /// The last dimension; 1 of a scalar.
    pub fn last(&self) -> u64 {
        self.values[..self.rank].last().copied().unwrap_or(1)
    }

    /// Strides of a view as `to` of a tensor of sizes `self` and these strides; `None` where a view cannot be
    /// (`computeStride` of PyTorch).
    pub fn view_strides(&self, strides: &Dims, to: &Dims) -> Option<Dims> {
        let mut new = *to;
        if self.elements() == 0 {
            return Some(to.contiguous_strides());
        }
        let mut left = to.rank;
        let mut chunk = 1;
        let mut base = strides.values[..strides.rank].last().copied().unwrap_or(1);
        for at in (0..self.rank).rev() {
            chunk *= self.values[at];
            let ends = at == 0 || (self.values[at - 1] != 1 && strides.values[at - 1] != chunk * base);
            if !ends {
                continue;
            }
            let mut seen = 1;
            while left > 0 && (seen < chunk || to.values[left - 1] == 1) {
                new.values[left - 1] = seen * base;
                seen *= to.values[left - 1];
                left -= 1;
            }
            if seen != chunk {
                return None;
            }
            if at > 0 {
                chunk = 1;
                base = strides.values[at - 1];
            }
        }
        if self.rank == 0 {
            return Some(to.contiguous_strides());
        }
        (left == 0).then_some(new)
    }
}

impl std::ops::Deref for Dims {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.values[..self.rank]
    }
}
