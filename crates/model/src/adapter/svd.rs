//! The largest singular values of a matrix and their vectors: to f32's precision by a block Lanczos method with thick
//! restarts (Golub, Luk and Overton 1981; Wu and Simon 2000), or about so by power iterations on random vectors (Halko,
//! Martinsson and Tropp 2011, algorithm 4.4).
//!
//! The matrix is in f32 on a device of its own, which multiplies; vectors are in f64. Every sum has one order, so that
//! the bits are the same whatever the number of threads.

use plimsoll_device::{Compute, Cpu, CpuOptions, DType, Device, DeviceError, DeviceExt, Product, Tensor};
use plimsoll_memory::Tag;

use crate::init;

/// Vectors that are multiplied at a time.
const BLOCK: usize = 8;

/// Vectors that are kept beyond those that are wanted: they converge first what is near the border.
const SPARE: usize = 8;

/// Further vectors of a basis before it is condensed.
const WORKING: usize = 32;

/// Vectors are found where W^T W v differs from s^2 v by this share of the smallest s^2 that is wanted.
const PRECISE: f64 = 2e-6;

/// Products in f32 may leave a residue up to this share that no further round makes smaller.
const FLOOR: f64 = 1e-4;

/// Rounds that a matrix without any gap in its spectrum may take.
const MOST_ROUNDS: usize = 30;

/// A vector of which this share is left depends on the others.
const DEPENDENT: f64 = 1e-10;

/// Sweeps of Jacobi's method, which converges quadratically.
const MOST_SWEEPS: usize = 20;

/// Room in the arena for what is rounded up.
const SLACK: u64 = 64 << 10;

/// Vectors of one width.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    width: usize,
    values: Vec<f64>,
}

impl Rows {
    fn new(width: usize) -> Rows {
        Rows { width: width.max(1), values: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.values.len() / self.width
    }

    pub fn iter(&self) -> impl Iterator<Item = &[f64]> {
        self.values.chunks_exact(self.width)
    }

    fn extend(&mut self, other: Rows) {
        self.values.extend(other.values);
    }

    /// Sums of the rows, a factor for each.
    fn combine<'f>(&self, factors: impl Iterator<Item = &'f [f64]>) -> Rows {
        let mut out = Rows::new(self.width);
        for factors in factors {
            let mut sum = vec![0.0; self.width];
            self.iter().zip(factors).for_each(|(row, factor)| add(&mut sum, *factor, row));
            out.values.extend(sum);
        }
        out
    }

    /// The products of every two rows.
    fn gram(&self) -> Vec<f64> {
        let n = self.len();
        let mut gram = vec![0.0; n * n];
        for (i, a) in self.iter().enumerate() {
            for (j, b) in self.iter().enumerate().take(i + 1) {
                let product = dot(a, b);
                for at in [i * n + j, j * n + i] {
                    if let Some(out) = gram.get_mut(at) {
                        *out = product;
                    }
                }
            }
        }
        gram
    }

    /// What of the rows is orthogonal to `basis` and to each other, with length 1; at most `most` of them.
    fn orthonormal(&self, basis: &Rows, most: usize) -> Rows {
        let mut out = Rows::new(self.width);
        for row in self.iter() {
            if out.len() >= most {
                break;
            }
            let mut vector = row.to_vec();
            let before = dot(&vector, &vector).sqrt();
            // One pass leaves errors of the condition's size.
            for _ in 0..2 {
                for other in basis.iter().chain(out.iter()) {
                    let share = dot(&vector, other);
                    add(&mut vector, -share, other);
                }
            }
            let left = dot(&vector, &vector).sqrt();
            if left > before * DEPENDENT {
                out.values.extend(vector.iter().map(|x| x / left));
            }
        }
        out
    }
}

/// Eight sums side by side, which is a fixed order.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

fn add(out: &mut [f64], factor: f64, row: &[f64]) {
    out.iter_mut().zip(row).for_each(|(out, x)| *out += factor * x);
}

/// Eigenvalues of a symmetric matrix `[n, n]` in falling order, and their vectors, by Jacobi's cyclic method (1846).
fn eigenvectors(matrix: &mut [f64], n: usize) -> (Vec<f64>, Rows) {
    let mut vectors = vec![0.0; n * n];
    vectors.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
    for _ in 0..MOST_SWEEPS {
        let mut turned = false;
        for p in 0..n {
            for q in p + 1..n {
                turned |= annihilate(matrix, &mut vectors, n, p, q);
            }
        }
        if !turned {
            break;
        }
    }
    let value = |i: usize| matrix.get(i * n + i).copied().unwrap_or(0.0);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| value(*b).total_cmp(&value(*a)).then(a.cmp(b)));
    let mut sorted = Rows::new(n);
    order.iter().filter_map(|i| vectors.get(i * n..(i + 1) * n)).for_each(|v| sorted.values.extend(v));
    (order.into_iter().map(value).collect(), sorted)
}

/// Turns rows and columns p and q so that element (p, q) becomes 0; whether it was not.
fn annihilate(matrix: &mut [f64], vectors: &mut [f64], n: usize, p: usize, q: usize) -> bool {
    let at = |i: usize, j: usize| matrix.get(i * n + j).copied().unwrap_or(0.0);
    let (app, aqq, apq) = (at(p, p), at(q, q), at(p, q));
    let small = f64::EPSILON * (app.abs() * aqq.abs()).sqrt();
    if apq.abs() <= small.max(f64::MIN_POSITIVE) || !apq.is_finite() {
        return false;
    }
    let theta = (aqq - app) / (2.0 * apq);
    let tangent = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let c = 1.0 / (tangent * tangent + 1.0).sqrt();
    let s = c * tangent;
    for rows in [&mut *matrix, vectors] {
        let (head, tail) = rows.split_at_mut(q * n);
        let (head, tail) = (head.get_mut(p * n..(p + 1) * n), tail.get_mut(..n));
        for (x, y) in head.into_iter().flatten().zip(tail.into_iter().flatten()) {
            (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
        }
    }
    for row in matrix.chunks_exact_mut(n) {
        if let Ok([x, y]) = row.get_disjoint_mut([p, q]) {
            (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
        }
    }
    if let Ok(zeros) = matrix.get_disjoint_mut([p * n + q, q * n + p]) {
        zeros.into_iter().for_each(|x| *x = 0.0);
    }
    true
}

/// The largest singular values and their vectors.
#[derive(Clone, Debug)]
pub(super) struct Singular {
    /// In falling order.
    pub values: Vec<f64>,
    /// `[r, out]`, one for each value.
    pub left: Rows,
    /// `[r, in]`
    pub right: Rows,
}

/// A device for matrices one after the other.
pub(super) struct SvdDevice(Cpu);

impl SvdDevice {
    /// With room for matrices up to one of so many elements and so many rows and columns together, and singular vectors
    /// up to `rank`. Of one thread: others would take scratch that no plan counts.
    pub fn new(elements: u64, sides: u64, rank: u64) -> Result<SvdDevice, DeviceError> {
        let vectors = rank.saturating_add((SPARE + BLOCK) as u64).saturating_mul(sides);
        let bytes = elements.saturating_add(vectors).saturating_mul(4).saturating_add(SLACK);
        Ok(SvdDevice(Cpu::new(bytes, CpuOptions { threads: Some(1), isa: None })?))
    }

    /// The `rank` largest singular values of the matrix `[rows, columns]` that `fill` writes. Random vectors are a
    /// function of `name` and `seed`.
    pub fn largest(
        &self,
        [rows, columns]: [u64; 2],
        rank: usize,
        power_iterations: Option<u32>,
        (name, seed): (&str, u64),
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<Singular, DeviceError> {
        let weight = self.0.alloc(DType::F32, &[rows, columns], Tag::Workspace, "svd.weight")?;
        self.0.write(&weight, fill)?;
        // Vectors are as short as they can be.
        let flipped = rows < columns;
        let (narrow, wide) = if flipped { (rows, columns) } else { (columns, rows) };
        let operator = Operator { device: &self.0, weight, flipped, narrow: narrow as usize };
        let rank = rank.min(narrow as usize);
        let random = |count: usize| Rows {
            width: narrow as usize,
            values: init::normal_values(name, seed, count * narrow as usize, 1.0)
                .into_iter()
                .map(f64::from)
                .collect(),
        };
        let (values, short, long) = match power_iterations {
            None => operator.lanczos(rank, random(BLOCK.min(narrow as usize)), wide as usize)?,
            Some(count) => operator.power_iterations(count, random(rank))?,
        };
        let (left, right) = if flipped { (short, long) } else { (long, short) };
        Ok(Singular { values, left, right })
    }
}

/// A matrix M, taller than wide: the weight, or its transpose.
struct Operator<'d> {
    device: &'d Cpu,
    weight: Tensor,
    flipped: bool,
    narrow: usize,
}

impl Operator<'_> {
    /// M x, for rows x.
    fn forward(&self, x: &Rows) -> Result<Rows, DeviceError> {
        self.product(x, !self.flipped)
    }

    /// M^T y, for rows y.
    fn back(&self, y: &Rows) -> Result<Rows, DeviceError> {
        self.product(y, self.flipped)
    }

    /// x W^T, or x W.
    fn product(&self, x: &Rows, transposed: bool) -> Result<Rows, DeviceError> {
        let [rows, columns] = [self.weight.rows(), self.weight.columns()];
        let (inputs, outputs) = if transposed { (columns, rows) } else { (rows, columns) };
        let alloc =
            |width, name| self.device.alloc(DType::F32, &[x.len() as u64, width], Tag::Workspace, name);
        let mut result = Rows::new(outputs as usize);
        if x.len() == 0 {
            return Ok(result);
        }
        let (given, out) = (alloc(inputs, "svd.x")?, alloc(outputs, "svd.y")?);
        let narrow: Vec<f32> = x.values.iter().map(|x| *x as f32).collect();
        self.device.write_f32(&given, &narrow)?;
        let (weight, accumulate, compute) = (&self.weight, false, Compute::F32);
        self.device.run(if transposed {
            Product::Linear { x: &given, weight, bias: None, out: &out, accumulate, compute }
        } else {
            Product::LinearBackwardInput { dout: &given, weight, dx: &out, accumulate, compute }
        })?;
        result.values.extend(self.device.read_f32(&out)?.into_iter().map(f64::from));
        Ok(result)
    }

    /// The basis is grown by what the last vectors become under M^T M, and condensed to the best sums of its vectors
    /// whenever it is full.
    fn lanczos(&self, rank: usize, start: Rows, wide: usize) -> Result<(Vec<f64>, Rows, Rows), DeviceError> {
        let keep = (rank + SPARE).min(self.narrow);
        let most = (3 * keep + WORKING).min(self.narrow);
        let (mut basis, mut images) = (Rows::new(self.narrow), Rows::new(wide));
        let mut next = start.orthonormal(&basis, most);
        let mut values = Vec::new();
        let mut last = f64::INFINITY;
        for _ in 0..MOST_ROUNDS {
            // A block that is cut would leave directions behind.
            while next.len() > 0 && basis.len() + next.len() <= most {
                let image = self.forward(&next)?;
                let grown = self.back(&image)?;
                basis.extend(next);
                images.extend(image);
                next = grown.orthonormal(&basis, (self.narrow - basis.len()).min(BLOCK));
            }
            let (all, vectors) = eigenvectors(&mut images.gram(), images.len());
            let complete = next.len() == 0;
            basis = basis.combine(vectors.iter().take(keep));
            images = images.combine(vectors.iter().take(keep));
            values = all.into_iter().take(keep).collect();
            if complete {
                break;
            }
            let mut residues = self.back(&images)?;
            let mut worst: f64 = 0.0;
            let width = residues.width;
            for ((residue, vector), value) in
                residues.values.chunks_exact_mut(width).zip(basis.iter()).zip(&values).take(rank)
            {
                add(residue, -value, vector);
                worst = worst.max(dot(residue, residue).sqrt());
            }
            let wanted = values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0);
            let at_floor = worst <= FLOOR * wanted && worst > 0.9 * last;
            if worst <= PRECISE * wanted || at_floor {
                break;
            }
            last = worst;
        }
        basis.values.truncate(rank * basis.width);
        images.values.truncate(rank * images.width);
        values.truncate(rank);
        Ok(finished(values, basis, images))
    }

    fn power_iterations(&self, count: u32, start: Rows) -> Result<(Vec<f64>, Rows, Rows), DeviceError> {
        let rank = start.len();
        let orthonormal = |rows: Rows| rows.orthonormal(&Rows::new(rows.width), rank);
        let mut range = orthonormal(self.forward(&start)?);
        for _ in 0..count {
            range = orthonormal(self.forward(&orthonormal(self.back(&range)?))?);
        }
        let short = self.back(&range)?;
        let (values, vectors) = eigenvectors(&mut short.gram(), short.len());
        let (short, long) = (short.combine(vectors.iter()), range.combine(vectors.iter()));
        let (values, long, short) = finished(values, long, short);
        Ok((values, short, long))
    }
}

/// Singular values of eigenvalues, and the images with length 1.
fn finished(values: Vec<f64>, vectors: Rows, mut images: Rows) -> (Vec<f64>, Rows, Rows) {
    let values: Vec<f64> = values.into_iter().map(|value| value.max(0.0).sqrt()).collect();
    let width = images.width;
    for (image, value) in images.values.chunks_exact_mut(width).zip(&values) {
        let factor = if *value > 0.0 { 1.0 / value } else { 0.0 };
        image.iter_mut().for_each(|x| *x *= factor);
    }
    (values, vectors, images)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix with the given singular values.
    fn matrix([rows, columns]: [usize; 2], values: &[f64]) -> Vec<f32> {
        let random = |name, width: usize| Rows {
            width,
            values: init::normal_values(name, 3, values.len() * width, 1.0)
                .into_iter()
                .map(f64::from)
                .collect(),
        };
        let unit = |rows: Rows| rows.orthonormal(&Rows::new(rows.width), usize::MAX);
        let (left, right) = (unit(random("left", rows)), unit(random("right", columns)));
        let mut out = vec![0.0; rows * columns];
        for ((left, right), value) in left.iter().zip(right.iter()).zip(values) {
            for (out, left) in out.chunks_exact_mut(columns).zip(left) {
                add(out, value * left, right);
            }
        }
        out.into_iter().map(|x| x as f32).collect()
    }

    fn largest(shape: [usize; 2], weight: &[f32], rank: usize, iterations: Option<u32>) -> Singular {
        let [rows, columns] = shape.map(|n| n as u64);
        let device = SvdDevice::new(rows * columns, rows + columns, rank as u64).unwrap();
        let fill = &mut |out: &mut [u8]| out.copy_from_slice(bytemuck::cast_slice(weight));
        device.largest([rows, columns], rank, iterations, ("weight", 1), fill).unwrap()
    }

    /// |W - U S V^T|, of the largest values only.
    fn residue(weight: &[f32], columns: usize, found: &Singular) -> f64 {
        let mut rest: Vec<f64> = weight.iter().map(|x| f64::from(*x)).collect();
        for ((left, right), value) in found.left.iter().zip(found.right.iter()).zip(&found.values) {
            for (rest, left) in rest.chunks_exact_mut(columns).zip(left) {
                add(rest, -value * left, right);
            }
        }
        dot(&rest, &rest).sqrt()
    }

    #[test]
    fn the_largest_singular_values_are_found() {
        // Flat spectra, as trained weights have them, converge the slowest.
        type Spectrum = fn(usize) -> f64;
        let spectra: [(&str, Spectrum); 3] = [
            ("flat", |i| 1.0 + 1.0 / (1.0 + i as f64)),
            ("steep", |i| 0.7f64.powi(i as i32)),
            ("linear", |i| 300.0 - i as f64),
        ];
        for (name, value) in spectra {
            for (shape, rank) in
                [([300, 200], 16), ([200, 300], 4), ([40, 30], 30), ([7, 90], 3), ([260, 250], 1)]
            {
                let values: Vec<f64> = (0..shape[0].min(shape[1])).map(value).collect();
                let weight = matrix(shape, &values);
                let found = largest(shape, &weight, rank, None);
                assert_eq!(found.values.len(), rank);
                for (got, wanted) in found.values.iter().zip(&values) {
                    assert!((got - wanted).abs() < 1e-5 * values[0], "{name} {shape:?}: {got} for {wanted}");
                }
                let best = values[rank..].iter().map(|x| x * x).sum::<f64>().sqrt();
                let rest = residue(&weight, shape[1], &found);
                assert!(rest < best * (1.0 + 1e-6) + 1e-5 * values[0], "{name} {shape:?}: {rest} for {best}");
            }
        }
    }

    #[test]
    fn power_iterations_come_near_and_more_of_them_nearer() {
        let shape = [120, 150];
        let values: Vec<f64> = (0..120).map(|i| 1.0 / (1.0 + i as f64)).collect();
        let weight = matrix(shape, &values);
        let best = values[8..].iter().map(|x| x * x).sum::<f64>().sqrt();
        let [few, more] = [1, 16].map(|n| residue(&weight, 150, &largest(shape, &weight, 8, Some(n))));
        assert!(best < few && more < few && more < best * 1.001, "{best} {more} {few}");
    }

    #[test]
    fn matrices_of_low_rank_and_of_zeros_are_taken() {
        for iterations in [None, Some(2)] {
            let weight = matrix([50, 60], &[3.0, 2.0]);
            let found = largest([50, 60], &weight, 5, iterations);
            assert!(residue(&weight, 60, &found) < 1e-5, "{found:?}");
            let zeros = vec![0.0; 50 * 60];
            assert!(residue(&zeros, 60, &largest([50, 60], &zeros, 5, iterations)) == 0.0);
        }
    }
}
