//! Runs an operation on every instruction set and with one, two and three threads, and compares what it wrote. The same operation
//! runs through the kernels of GPUs too, on a driver without a GPU, with the threads of a block in several orders.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use half::{bf16, f16};
use plimsoll_device::cpu::{Isa, Pool};
use plimsoll_device::cuda::{Driver, OpenCard};
use plimsoll_device::{Cpu, Cuda, DType, Device, DeviceError, Tensor};
use plimsoll_memory::{Library, Tag};

use crate::mock;

/// A tensor's type, sizes and values; the values are what remains of those given once they are stored.
#[derive(Clone)]
pub struct Operand {
    dtype: DType,
    sizes: Vec<u64>,
    pub values: Vec<f64>,
    bytes: Vec<u8>,
}

impl Operand {
    pub fn new(dtype: DType, sizes: &[usize], values: impl IntoIterator<Item = f64>) -> Operand {
        let values: Vec<f64> = values.into_iter().take(sizes.iter().product()).collect();
        let bytes = encode(dtype, &values);
        let values = decode(dtype, &bytes);
        Operand { dtype, sizes: sizes.iter().map(|n| *n as u64).collect(), values, bytes }
    }

    /// Blocks, which are only read.
    pub fn blocks(dtype: DType, sizes: &[usize], bytes: Vec<u8>) -> Operand {
        Operand { dtype, sizes: sizes.iter().map(|n| *n as u64).collect(), values: Vec::new(), bytes }
    }

    pub fn u32s(values: &[u32]) -> Operand {
        Operand::new(DType::U32, &[values.len()], values.iter().map(|x| f64::from(*x)))
    }

    /// To be written: what is in it does not count.
    pub fn garbage(dtype: DType, sizes: &[usize]) -> Operand {
        Operand::new(dtype, sizes, std::iter::repeat(f64::NAN))
    }
}

/// What the operand of that number must hold afterwards.
pub struct Expected {
    pub operand: usize,
    pub values: Vec<f64>,
    /// Of the value, or of the root mean square of all values where that is larger; the rounding of a narrow type
    /// comes on top.
    pub tolerance: f64,
}

/// Checks the operation on every instruction set and number of threads: what it must write, that it writes nothing
/// else, and that the number of threads does not change a bit.
pub fn check(
    label: &str,
    operands: &[Operand],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
    expected: &[Expected],
) {
    check_on_all(label, operands, op, expected, &[], &ORDERS);
}

/// The same of a product: GPUs without the tensor cores that there are kernels for have others, and one with a small workspace goes by
/// more parts.
pub fn check_product(
    label: &str,
    operands: &[Operand],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
    expected: &[Expected],
) {
    check(label, operands, &op, expected);
    let Some(gpu) = gpu() else { return };
    let of_mock = gpu.mock.iter().flat_map(|mock| [("older", &mock.older), ("compute 8.0", &mock.ampere)]);
    for (name, cuda) in of_mock.chain([("by parts on a", &gpu.by_parts)]) {
        let label = format!("{label}, {name} GPU");
        check_on_gpu(&label, &gpu, cuda, operands, &op, expected, &[], &ORDERS[..2]);
    }
}

/// The same of what takes long through the kernels of GPUs: one case of four runs there, and all small ones; with the feature
/// `all-cases` and on a card, all. Some operands are workspace: what is expected there is the CPU's alone.
pub fn check_costly(
    label: &str,
    operands: &[Operand],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
    expected: &[Expected],
    workspace: &[usize],
) {
    let elements: u64 = operands.iter().map(|operand| operand.sizes.iter().product::<u64>()).sum();
    let mut hasher = DefaultHasher::new();
    label.hash(&mut hasher);
    let all = cfg!(any(feature = "all-cases", feature = "card"));
    let chosen = all || elements < 4096 || hasher.finish().is_multiple_of(4);
    check_on_all(label, operands, op, expected, workspace, if chosen { &ORDERS[..2] } else { &[] });
}

fn check_on_all(
    label: &str,
    operands: &[Operand],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
    expected: &[Expected],
    workspace: &[usize],
    orders: &[u64],
) {
    check_on_isas(label, operands, &op, expected);
    if let Some(gpu) = gpu() {
        check_on_gpu(&format!("{label}, GPU"), &gpu, &gpu.cuda, operands, &op, expected, workspace, orders);
    }
}

fn check_on_gpu(
    label: &str,
    gpu: &Gpu,
    cuda: &Cuda,
    operands: &[Operand],
    op: RunOp<'_>,
    expected: &[Expected],
    workspace: &[usize],
    orders: &[u64],
) {
    let mut first = None;
    for order in orders {
        gpu.order(*order);
        let got = run_on(cuda, operands, op).unwrap_or_else(|error| panic!("{label}: {error}"));
        gpu.order(0);
        check_results(label, operands, &got, expected, workspace);
        let first = first.get_or_insert_with(|| got.clone());
        assert!(*first == got, "{label}: threads in another order give other bits");
    }
}

fn check_on_isas(label: &str, operands: &[Operand], op: RunOp<'_>, expected: &[Expected]) {
    for isa in Isa::available() {
        let alone = run(isa, 1, operands, op).unwrap_or_else(|error| panic!("{label}, {isa}: {error}"));
        for threads in [2, 3] {
            let together = run(isa, threads, operands, op).unwrap();
            assert!(together == alone, "{label}, {isa}: {threads} threads give other bits than one");
        }
        check_results(&format!("{label}, {isa}"), operands, &alone, expected, &[]);
    }
}

fn check_results(
    label: &str,
    operands: &[Operand],
    got: &[Vec<u8>],
    expected: &[Expected],
    workspace: &[usize],
) {
    for (number, operand) in operands.iter().enumerate().filter(|(number, _)| !workspace.contains(number)) {
        match expected.iter().find(|e| e.operand == number) {
            Some(e) => {
                let values = decode(operand.dtype, &got[number]);
                compare(&format!("{label}, operand {number}"), operand.dtype, &values, e);
            }
            None => assert!(operand.bytes == got[number], "{label}: operand {number} was written"),
        }
    }
}

/// Seeds of the orders of threads: as they are counted, and two shuffled ones.
const ORDERS: [u64; 3] = [0, 1, 2];

/// Runs an operation on a device's tensors.
pub type RunOp<'f> = &'f dyn Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>;

/// Checks that the first operation gives the same bits in the operand of that number as the second in its own.
pub fn check_in_place(
    label: &str,
    apart: (&[Operand], RunOp<'_>, usize),
    in_place: (&[Operand], RunOp<'_>, usize),
) {
    for isa in Isa::available() {
        let want = run(isa, 2, apart.0, apart.1).unwrap();
        let got = run(isa, 2, in_place.0, in_place.1).unwrap_or_else(|error| panic!("{label}: {error}"));
        assert!(want[apart.2] == got[in_place.2], "{label}, {isa}: in place gives other bits");
    }
    if let Some(gpu) = gpu() {
        let [want, got] = [apart, in_place].map(|(operands, op, _)| run_on(&gpu.cuda, operands, op).unwrap());
        assert!(want[apart.2] == got[in_place.2], "{label}, GPU: in place gives other bits");
    }
}

/// The message with which the operation is refused.
pub fn refusal(
    operands: &[Operand],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
) -> String {
    match run(Isa::detect(), 2, operands, &op) {
        Ok(_) => "accepted".to_owned(),
        Err(error) => error.to_string(),
    }
}

/// The bytes of every operand after the operation.
pub fn run(
    isa: Isa,
    threads: usize,
    operands: &[Operand],
    op: RunOp<'_>,
) -> Result<Vec<Vec<u8>>, DeviceError> {
    run_on(&*device(isa, threads), operands, op)
}

/// The same on a device.
fn run_on(device: &dyn Device, operands: &[Operand], op: RunOp<'_>) -> Result<Vec<Vec<u8>>, DeviceError> {
    let mut tensors = Vec::new();
    for operand in operands {
        let tensor = device.alloc(operand.dtype, &operand.sizes, Tag::Workspace, "operand").unwrap();
        device.write(&tensor, &mut |out| out.copy_from_slice(&operand.bytes)).unwrap();
        tensors.push(tensor);
    }
    op(device, &tensors)?;
    let mut results = Vec::new();
    for tensor in &tensors {
        device.read(tensor, &mut |x| results.push(x.to_vec()))?;
    }
    Ok(results)
}

/// A card, or one that is none with a way to say in which order its threads take turns.
struct Gpu {
    /// With all that there are kernels for.
    cuda: Cuda,
    /// The same with room to round only small parts of operands.
    by_parts: Cuda,
    mock: Option<Mock>,
}

/// Bytes that parts of operands have there.
const PART_BYTES: u64 = 256 << 10;

struct Mock {
    /// Without tensor cores that there are kernels for.
    older: Cuda,
    /// With tensor cores that multiply no whole tiles.
    ampere: Cuda,
    set_order: extern "C" fn(u64),
    /// Open as long as its function is called.
    _library: Library,
}

impl Gpu {
    fn order(&self, seed: u64) {
        if let Some(mock) = &self.mock {
            (mock.set_order)(seed);
        }
    }
}

impl std::ops::Deref for Gpu {
    type Target = Cuda;

    fn deref(&self) -> &Cuda {
        &self.cuda
    }
}

/// The GPU of each test thread, where it can be had: the system's with the feature `card`, else one that is none.
fn gpu() -> Option<Rc<Gpu>> {
    thread_local!(static GPU: RefCell<Option<Rc<Gpu>>> = const { RefCell::new(None) });
    let path = if cfg!(feature = "card") { None } else { Some(mock::library()?) };
    GPU.with_borrow_mut(|gpu| {
        let made = gpu.get_or_insert_with(|| {
            let Some(path) = path else {
                let driver = Driver::load().unwrap();
                let whole = OpenCard::new(&driver, 0).unwrap();
                let by_parts = OpenCard::with_part_bytes(&driver, 0, PART_BYTES).unwrap();
                let [cuda, by_parts] = [whole, by_parts].map(|card| Cuda::new(&card, 16 << 20).unwrap());
                return Rc::new(Gpu { cuda, by_parts, mock: None });
            };
            let library = Library::open(path).unwrap();
            type Set = extern "C" fn(u64, u64, u64, u64);
            // SAFETY: these are the functions' types in `driver.cpp`.
            let (set_order, set_machine) = unsafe {
                let set_machine: Set = library.function(c"mock_machine").unwrap();
                (library.function(c"mock_order").unwrap(), set_machine)
            };
            let open = |(capability, part_bytes)| {
                set_machine(1, capability, 12_040, 8 << 30);
                let driver = Driver::open(path).unwrap();
                let card = OpenCard::with_part_bytes(&driver, 0, part_bytes).unwrap();
                Cuda::new(&card, 16 << 20).unwrap()
            };
            let cards = [(75, 0), (80, 0), (90, 64 << 20), (90, PART_BYTES)];
            let [older, ampere, cuda, by_parts] = cards.map(open);
            Rc::new(Gpu { cuda, by_parts, mock: Some(Mock { older, ampere, set_order, _library: library }) })
        });
        Some(Rc::clone(made))
    })
}

/// What an operation leaves in its operands on a GPU, if one is to be had.
pub fn run_on_gpu(operands: &[Operand], op: RunOp<'_>) -> Option<Result<Vec<Vec<u8>>, DeviceError>> {
    gpu().map(|gpu| run_on(&gpu.cuda, operands, op))
}

/// A number on the device.
pub fn factor(device: &dyn Device, value: f32) -> Result<Tensor, DeviceError> {
    let factor = device.alloc(DType::F32, &[1], Tag::Workspace, "factor")?;
    device.write_f32(&factor, &[value])?;
    Ok(factor)
}

/// A device for each test thread, instruction set and number of threads, for all its operations.
fn device(isa: Isa, threads: usize) -> Rc<Cpu> {
    thread_local!(static DEVICES: RefCell<Vec<Rc<Cpu>>> = const { RefCell::new(Vec::new()) });
    DEVICES.with_borrow_mut(|devices| {
        let same_threads = |cpu: &&Rc<Cpu>| cpu.threads() == threads;
        if let Some(cpu) = devices.iter().filter(same_threads).find(|cpu| cpu.isa() == isa) {
            return Rc::clone(cpu);
        }
        let pool = match devices.iter().find(same_threads) {
            Some(cpu) => Arc::clone(cpu.pool()),
            None => Arc::new(Pool::new(threads, Cpu::SCRATCH_BYTES).unwrap()),
        };
        let cpu = Rc::new(Cpu::with_pool(pool, isa, 16 << 20).unwrap());
        devices.push(Rc::clone(&cpu));
        cpu
    })
}

/// How much further than a reference allows results of a card may be: an H200 was 3 to 4 % further in three cases of all (products on
/// tensor cores over an inner length of 2088, attention of one query in f32).
const OF_A_CARD: f64 = if cfg!(feature = "card") { 1.25 } else { 1.0 };

fn compare(label: &str, dtype: DType, got: &[f64], expected: &Expected) {
    let want = &expected.values;
    assert_eq!(got.len(), want.len(), "{label}: number of elements");
    let finite = want.iter().filter(|x| x.is_finite());
    let typical = (finite.map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        // What is nearly too small for a normal number may become 0.
        let smallest = 16.0 * f64::from(f32::MIN_POSITIVE);
        let allowed = OF_A_CARD * expected.tolerance * want.abs().max(typical)
            + half_step(dtype) * want.abs()
            + smallest;
        let same = got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= allowed;
        assert!(same, "{label}, element {i}: {got:e} instead of {want:e}, allowed is {allowed:e}");
    }
}

/// The largest relative error of rounding to nearest.
fn half_step(dtype: DType) -> f64 {
    match dtype {
        DType::Bf16 => f64::from(bf16::EPSILON) / 2.0,
        DType::F16 => f64::from(f16::EPSILON) / 2.0,
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect(),
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x as f32).to_ne_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|x| f16::from_f32(*x as f32).to_ne_bytes()).collect(),
        DType::F64 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        DType::U32 => values.iter().flat_map(|x| (*x as u32).to_ne_bytes()).collect(),
        DType::I8 => values.iter().map(|x| *x as i8 as u8).collect(),
        DType::U8 => values.iter().map(|x| *x as u8).collect(),
        other => panic!("{other} is not plain"),
    }
}

pub fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => {
            bytes.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect()
        }
        DType::Bf16 => {
            bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes(b.try_into().unwrap()).to_f64()).collect()
        }
        DType::F16 => {
            bytes.chunks_exact(2).map(|b| f16::from_ne_bytes(b.try_into().unwrap()).to_f64()).collect()
        }
        DType::U32 => {
            bytes.chunks_exact(4).map(|b| f64::from(u32::from_ne_bytes(b.try_into().unwrap()))).collect()
        }
        DType::F64 => bytes.chunks_exact(8).map(|b| f64::from_ne_bytes(b.try_into().unwrap())).collect(),
        DType::I8 => bytes.iter().map(|b| f64::from(*b as i8)).collect(),
        DType::U8 => bytes.iter().map(|b| f64::from(*b)).collect(),
        other => panic!("{other} is not plain"),
    }
}

/// The ways of storing up to three tensors as f32 or bf16; of more, those in which any two go together in every way.
pub fn storages<const N: usize>() -> impl Iterator<Item = [DType; N]> {
    let all = 1usize << N;
    let mixed = [0, usize::MAX, 0x5555, 0xaaaa, 0x3333, 0xcccc, 0x0f0f, 0xf0f0];
    let patterns = if N <= 3 { (0..all).collect() } else { mixed.to_vec() };
    patterns.into_iter().map(|bits| std::array::from_fn(|i| [DType::F32, DType::Bf16][bits >> i & 1]))
}

/// Numbers between -1 and 1, the same for the same seed (SplitMix64).
pub fn noise(seed: u64) -> impl Iterator<Item = f64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    })
}

/// Checks a gradient of `loss` against central differences.
pub fn check_gradient(label: &str, x: &[f64], gradient: &[f64], loss: impl Fn(&[f64]) -> f64) {
    check_gradient_within(1e-7, label, x, gradient, loss);
}

/// The same, of a gradient that was computed in f32.
pub fn check_gradient_within(
    tolerance: f64,
    label: &str,
    x: &[f64],
    gradient: &[f64],
    loss: impl Fn(&[f64]) -> f64,
) {
    let step = 1e-5;
    for i in 0..x.len() {
        let at = |shift: f64| {
            let mut moved = x.to_vec();
            moved[i] += shift;
            loss(&moved)
        };
        let difference = (at(step) - at(-step)) / (2.0 * step);
        let error = (difference - gradient[i]).abs();
        assert!(
            error < tolerance * (1.0 + difference.abs()),
            "{label}, {i}: {} against {difference}",
            gradient[i]
        );
    }
}
