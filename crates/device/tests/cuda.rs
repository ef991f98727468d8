//! The device of NVIDIA GPUs on a driver without one: what it takes and gives back, what it says when something fails.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plimsoll_device::cuda::{
    CardLink, Driver, FarMessage, LEAST_DRIVER, Nccl, OpenCard, Replays, SHARED_80, SHARED_90, SOURCES,
    SOURCES_80, SOURCES_90, UniqueId,
};
use plimsoll_device::{
    Channels, Compute, Cuda, CudaError, DType, Device, DeviceError, DeviceExt, DeviceTraits, Dry,
    Elementwise, Embedding, Lent, Product, Rounding, Subspace, Tensor,
};
use plimsoll_memory::{HostPool, Library, Loan, Tag};
use sha2::{Digest, Sha256};

#[path = "cuda/mock.rs"]
mod mock;

/// The driver's books are the process's: one test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The switches of the driver without a GPU. They are the calling thread's.
struct Mock {
    path: &'static Path,
    library: Library,
    _alone: MutexGuard<'static, ()>,
}

impl Mock {
    fn new() -> Option<Mock> {
        let path = mock::library()?;
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mock = Mock { path, library: Library::open(path).unwrap(), _alone: alone };
        mock.machine(1, 90, 12_040, 8 << 30);
        mock.fail_after(-1, 0);
        Some(mock)
    }

    fn machine(&self, cards: u64, capability: u64, driver: u64, memory: u64) {
        type Set = extern "C" fn(u64, u64, u64, u64);
        // SAFETY: that is the function's type in `driver.cpp`.
        let set: Set = unsafe { self.library.function(c"mock_machine") }.unwrap();
        set(cards, capability, driver, memory);
    }

    /// The call after so many fails with a code.
    fn fail_after(&self, calls: i64, code: i32) {
        type Set = extern "C" fn(i64, i32);
        // SAFETY: as above.
        let set: Set = unsafe { self.library.function(c"mock_fail_after") }.unwrap();
        set(calls, code);
    }

    fn calls(&self) -> u64 {
        type Get = extern "C" fn() -> u64;
        // SAFETY: as above.
        let get: Get = unsafe { self.library.function(c"mock_calls") }.unwrap();
        get()
    }

    /// Contexts, streams, events, modules, allocations and page-locked ranges that nobody has given back.
    fn live(&self) -> i64 {
        type Get = extern "C" fn() -> i64;
        // SAFETY: as above.
        let get: Get = unsafe { self.library.function(c"mock_live") }.unwrap();
        get()
    }

    /// What a graph takes of a card.
    fn graph_bytes(&self, bytes: u64) {
        type Set = extern "C" fn(u64);
        // SAFETY: as above.
        let set: Set = unsafe { self.library.function(c"mock_graph_bytes") }.unwrap();
        set(bytes);
    }

    fn card(&self) -> Result<std::sync::Arc<OpenCard>, CudaError> {
        OpenCard::new(&Driver::open(self.path)?, 0)
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.machine(1, 90, 12_040, 8 << 30);
        self.fail_after(-1, 0);
    }
}

fn tensor(device: &dyn Device, dtype: DType, sizes: &[u64]) -> Tensor {
    device.alloc(dtype, sizes, Tag::Workspace, "t").unwrap()
}

/// Something of everything: writing, computing, lending, copying both ways, reading. What comes out is checked.
fn everything(mock: &Mock) -> Result<(), DeviceError> {
    let card = mock.card()?;
    let device = Cuda::new(&card, 1 << 20)?;
    let pool = HostPool::new(device.host_memory(1 << 16)?);
    let [x, y] = [0, 1].map(|_| tensor(&device, DType::F32, &[1000]));
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    device.write_f32(&x, &values)?;
    device.run(Elementwise::Cast { x: &x, out: &y, rounding: Rounding::Nearest })?;
    device.run(Elementwise::Scale { x: &y, factor: 2.0 })?;
    // What comes again is a graph the second time: of nothing, and back again.
    let z = tensor(&device, DType::F32, &[1]);
    for step in 0..4 {
        device.write_f32(&z, &[0.0])?;
        let factor = (step + 2) as f32;
        for _ in 0..6 {
            device.run(Elementwise::Scale { x: &y, factor })?;
            device.run(Elementwise::Scale { x: &y, factor: 1.0 / factor })?;
        }
        device.finish()?;
    }
    device.run(Elementwise::Cast { x: &x, out: &y, rounding: Rounding::Nearest })?;
    device.run(Elementwise::Scale { x: &y, factor: 2.0 })?;
    let Lent::Memory(Loan::Far(mut far)) = device.lend(y)? else { panic!("a GPU's memory is far") };
    let copied = std::thread::scope(|scope| {
        let copy = || -> Result<_, plimsoll_memory::CopyError> {
            let mut region = pool.take(4000, Tag::Staging, "s").unwrap();
            far.copy_out(0, &mut region.bytes_mut()[..4000])?;
            region.bytes_mut().reverse();
            region.bytes_mut().reverse();
            far.copy_in(0, &region.bytes()[..2000])?;
            Ok(far)
        };
        scope.spawn(copy).join().unwrap()
    });
    let far = copied.map_err(|error| DeviceError::Mismatch { op: "copy", reason: error.to_string() })?;
    let whole = device.reclaim(Loan::Far(far))?;
    let y = whole.view(0, DType::F32, &[1000]).unwrap();
    device.run(Elementwise::Add { a: &x, b: &y, out: &y })?;
    let got = device.read_f32(&y)?;
    assert!(got.iter().zip(&values).all(|(got, x)| *got == 3.0 * x), "{got:?}");
    Ok(())
}

#[test]
fn what_is_taken_is_given_back_whatever_fails_and_wherever() {
    let Some(mock) = Mock::new() else { return };
    let before = mock.calls();
    everything(&mock).unwrap();
    let calls = (mock.calls() - before) as i64;
    assert_eq!(mock.live(), 0);
    for code in [1, 2, 719, 999] {
        for call in 0..calls {
            mock.fail_after(call, code);
            let error = everything(&mock).err();
            mock.fail_after(-1, 0);
            assert_eq!(mock.live(), 0, "call {call} failed with {code}: {error:?}");
            // Entering a context to give something back may fail unheard; all else is told.
            if let Some(DeviceError::Cuda(error)) = error {
                let lost = matches!(error, CudaError::Lost { .. });
                assert_eq!(lost, code > 2, "{error}");
            }
        }
    }
}

/// Kernels that come again are begun together, with what differs from step to step; the results are those of kernels one by one.
#[test]
fn steps_that_repeat_are_graphs() {
    let Some(mock) = Mock::new() else { return };
    let card = mock.card().unwrap();
    let device = Cuda::new(&card, 1 << 20).unwrap();
    let x = tensor(&device, DType::F32, &[100]);
    // A step of 200 kernels: a list that is full, and the rest. The third step has other blocks in it.
    let step = |device: &Cuda, number: u32| {
        device.write_f32(&x, &[1.0; 100]).unwrap();
        for i in 0..200 {
            if number == 3 && i == 150 {
                let large = tensor(device, DType::F32, &[1000]);
                device.run(Elementwise::Fill { out: &large, value: 1.0 }).unwrap();
            }
            let factor = if i == 7 { number as f32 } else { 1.0 };
            device.run(Elementwise::Scale { x: &x, factor }).unwrap();
        }
        assert_eq!(device.read_f32(&x).unwrap(), [number as f32; 100]);
        device.replays()
    };
    let one_by_one = step(&device, 1);
    assert_eq!(one_by_one, Replays { one_by_one: 200, ..Replays::default() });
    let made = step(&device, 2);
    assert_eq!(made, Replays { graphs: 2, launched: 2, changed: 0, one_by_one: 200 });
    let other = step(&device, 3);
    assert_eq!(other, Replays { graphs: 2, launched: 3, changed: 1, one_by_one: 273 });
    assert_eq!(step(&device, 4), Replays { launched: 5, changed: 2, ..other });
    assert_eq!(step(&device, 4), Replays { launched: 7, changed: 2, ..other });
    // Few kernels are launched one by one, however often they come.
    for _ in 0..3 {
        device.run(Elementwise::Fill { out: &x, value: 1.0 }).unwrap();
        device.finish().unwrap();
    }
    assert_eq!(device.replays(), Replays { launched: 7, changed: 2, one_by_one: 276, ..other });
    drop(device);
    // Where a graph takes much of the card, there are no more.
    mock.graph_bytes(5 << 20);
    let device = Cuda::new(&card, 1 << 20).unwrap();
    let x = tensor(&device, DType::F32, &[100]);
    let steps = [1, 2, 3, 4].map(|number| {
        device.write_f32(&x, &[1.0; 100]).unwrap();
        for _ in 0..300 {
            device.run(Elementwise::Scale { x: &x, factor: number as f32 / 2.0 + 0.5 }).unwrap();
            device.run(Elementwise::Fill { out: &x, value: 1.0 }).unwrap();
        }
        assert_eq!(device.read_f32(&x).unwrap(), [1.0; 100]);
        device.replays()
    });
    mock.graph_bytes(64 << 10);
    // Five lists: a second graph that is as large would be beyond what there may be.
    assert_eq!(steps[1], Replays { graphs: 1, launched: 1, changed: 0, one_by_one: 600 + 472 });
    assert_eq!(steps[2], Replays { graphs: 1, launched: 2, changed: 64, one_by_one: 600 + 472 + 472 });
    assert_eq!(steps[3].graphs, 1);
}

#[test]
fn what_is_missing_is_said_in_words() {
    let Some(mock) = Mock::new() else { return };
    let none = Driver::open(Path::new("/no/such/libcuda.so.1")).unwrap_err();
    assert!(
        matches!(none, CudaError::NoDriver(_)) && none.to_string().contains("install the driver"),
        "{none}"
    );
    mock.machine(0, 90, 12_040, 1 << 30);
    assert_eq!(mock.card().unwrap_err(), CudaError::NoCard);
    mock.machine(1, 90, u64::from(LEAST_DRIVER) - 10, 1 << 30);
    let old = mock.card().unwrap_err().to_string();
    assert_eq!(
        old,
        "the NVIDIA driver is too old: it is for CUDA 11.7; CUDA 11.8 is needed, driver 520 or later"
    );
    mock.machine(1, 70, 12_040, 1 << 30);
    let card = mock.card().unwrap_err().to_string();
    assert_eq!(card, "Mock 0 has compute capability 7.0; 7.5 is needed: Turing (2018) or later");
    mock.machine(2, 75, 12_040, 1 << 30);
    let driver = Driver::open(mock.path).unwrap();
    assert_eq!(driver.cards().unwrap().len(), 2);
    assert_eq!(OpenCard::new(&driver, 1).unwrap().card().index, 1);
    let outside = OpenCard::new(&driver, 2).unwrap_err().to_string();
    assert_eq!(outside, "there is no card 2: the driver finds 2, numbered from 0");
    let all = "1: Mock 1, 1.00 GiB, 4 multiprocessors, compute capability 7.5";
    assert_eq!(driver.cards().unwrap()[1].to_string(), all);
}

/// The arena takes as many bytes as were planned and no more; what else is taken is known before.
#[test]
fn memory_is_counted_to_the_byte() {
    let Some(mock) = Mock::new() else { return };
    let card = mock.card().unwrap();
    let beside = card.taken_bytes().unwrap();
    assert!(beside > (16 << 20) && beside < (1 << 30), "{beside}");
    let bytes = 12_345 * 256;
    let device = Cuda::new(&card, bytes).unwrap();
    assert_eq!(card.taken_bytes().unwrap(), beside + bytes);
    assert_eq!(device.arena().capacity(), bytes);
    drop(device);
    assert_eq!(card.taken_bytes().unwrap(), beside);
    let free = card.free_bytes().unwrap();
    let error = Cuda::new(&card, free + 1).err().unwrap().to_string();
    assert!(error.starts_with("the card has no") && error.contains("are free"), "{error}");
    drop(Cuda::new(&card, free).unwrap());
    drop(card);
    assert_eq!(mock.live(), 0);
}

/// Two ranks, each with a card and a thread of its own, send each other something of everything: from lent memory into lent memory in two
/// messages at once, and from a tensor into another. Every call of the library after so many fails, on both.
fn two_cards(mock: &Mock, nccl: &Path, fails_after: i64) -> [Result<(), DeviceError>; 2] {
    let id = Nccl::open(nccl).unwrap().unique_id().unwrap();
    let rank = |rank: u32| -> Result<(), DeviceError> {
        mock.machine(2, 90, 12_040, 8 << 30);
        let library = Library::open(nccl).unwrap();
        // SAFETY: that is the function's type in `nccl.cpp`.
        let set: extern "C" fn(i64) = unsafe { library.function(c"mock_nccl_fail_after") }.unwrap();
        set(fails_after);
        let card = OpenCard::new(&Driver::open(mock.path)?, rank)?;
        let before = card.taken_bytes()?;
        let id = UniqueId::of_bytes(&id.to_bytes()).unwrap();
        let link = CardLink::join(&Nccl::open(nccl)?, &card, id, (rank, 2), &mut || ());
        let link = link.inspect_err(|_| set(-1))?;
        // What it keeps for the other one is there before anything is planned.
        assert!(fails_after >= 0 || card.taken_bytes()? >= before + (1 << 20));
        let device = Cuda::new(&card, 1 << 20)?;
        let [x, out, y, z] = [0; 4].map(|_| tensor(&device, DType::F32, &[1000]));
        let of_rank = |rank: u32| (0..1000).map(move |i| (i + 5000 * rank) as f32).collect::<Vec<_>>();
        device.write_f32(&x, &of_rank(rank))?;
        device.run(Elementwise::Fill { out: &out, value: -1.0 })?;
        device.run(Elementwise::Cast { x: &x, out: &y, rounding: Rounding::Nearest })?;
        let other = 1 - rank;
        let (from, into) = (device.reach(&y)?.unwrap(), device.reach(&z)?.unwrap());
        let send = Some((other, (from.as_ref(), 0..4000)));
        link.exchange(&[FarMessage { send, receive: Some((other, (into.as_ref(), 0..4000))) }], &mut || ())?;
        drop((from, into));
        assert_eq!(device.read_f32(&z)?, of_rank(other));
        let Lent::Memory(Loan::Far(from)) = device.lend(x)? else { panic!("a GPU's memory is far") };
        let Lent::Memory(Loan::Far(into)) = device.lend(out)? else { panic!("a GPU's memory is far") };
        let half = |send: std::ops::Range<u64>, receive| FarMessage {
            send: Some((other, (from.as_ref(), send))),
            receive: Some((other, (into.as_ref(), receive))),
        };
        let outside = link.exchange(&[half(4092..4100, 0..8)], &mut || ()).unwrap_err().to_string();
        assert!(outside.contains("outside of their buffer"), "{outside}");
        link.exchange(&[half(0..2000, 0..2000), half(2000..4000, 2000..4000)], &mut || ())?;
        let whole = device.reclaim(Loan::Far(into))?;
        device.reclaim(Loan::Far(from))?;
        assert_eq!(device.read_f32(&whole.view(0, DType::F32, &[1000]).unwrap())?, of_rank(other));
        set(-1);
        Ok(())
    };
    let rank = &rank;
    let outcomes = std::thread::scope(|scope| {
        let [first, second] = [0, 1].map(|own| scope.spawn(move || rank(own)));
        [first.join().unwrap(), second.join().unwrap()]
    });
    // Who fails before there are any pipes leaves the folder for them.
    let folder = id.to_bytes();
    let folder = String::from_utf8_lossy(&folder);
    let _ = std::fs::remove_dir_all(folder.trim_end_matches('\0'));
    outcomes
}

#[test]
fn cards_reach_each_other_and_leave_nothing_behind_whatever_fails() {
    let Some(mock) = Mock::new() else { return };
    let Some(nccl) = mock::nccl() else { return };
    for outcome in two_cards(&mock, nccl, -1) {
        outcome.unwrap();
    }
    let library = Library::open(nccl).unwrap();
    // SAFETY: that is the function's type in `nccl.cpp`.
    let live: extern "C" fn() -> i32 = unsafe { library.function(c"mock_nccl_live") }.unwrap();
    assert_eq!((mock.live(), live()), (0, 0));
    for call in 0.. {
        let outcomes = two_cards(&mock, nccl, call);
        assert_eq!((mock.live(), live()), (0, 0), "call {call}: {outcomes:?}");
        let failed = outcomes.into_iter().filter_map(Result::err).inspect(|error| {
            assert!(error.to_string().contains("unhandled system error"), "call {call}: {error}");
        });
        if failed.count() == 0 {
            // The version, joining, four groups of sends and receives.
            assert!(call > 10, "{call}");
            break;
        }
    }
}

/// Who waits for a rank that is gone is told, and may give up.
#[test]
fn a_rank_that_is_gone_is_an_error_for_those_who_wait_for_it() {
    let Some(mock) = Mock::new() else { return };
    let Some(nccl) = mock::nccl() else { return };
    let id = Nccl::open(nccl).unwrap().unique_id().unwrap();
    let join = |rank: u32| {
        mock.machine(2, 90, 12_040, 8 << 30);
        let card = OpenCard::new(&Driver::open(mock.path).unwrap(), rank).unwrap();
        let link = CardLink::join(&Nccl::open(nccl).unwrap(), &card, id, (rank, 2), &mut || ()).unwrap();
        (card, link)
    };
    let (library, join) = (Library::open(nccl).unwrap(), &join);
    // SAFETY: that is the function's type in `nccl.cpp`.
    let lost: extern "C" fn(i32) = unsafe { library.function(c"mock_nccl_lost") }.unwrap();
    std::thread::scope(|scope| {
        let gone = scope.spawn(move || drop(join(1)));
        let (card, link) = join(0);
        gone.join().unwrap();
        let device = Cuda::new(&card, 1 << 20).unwrap();
        let x = tensor(&device, DType::F32, &[1000]);
        let far = device.reach(&x).unwrap().unwrap();
        let message = || [FarMessage { send: None, receive: Some((1, (far.as_ref(), 0..4000))) }];
        let mut looks = 0;
        let error = link.exchange(&message(), &mut || {
            looks += 1;
            if looks == 3 {
                lost(6);
            }
        });
        lost(0);
        assert!(error.unwrap_err().to_string().contains("remote process"));
        let again = link.exchange(&message(), &mut || ()).unwrap_err().to_string();
        assert!(again.contains("an exchange before it failed"), "{again}");
    });
    assert_eq!(mock.live(), 0);
}

#[test]
fn an_nccl_that_is_missing_or_too_old_is_said_in_words() {
    let none = Nccl::open(Path::new("/no/such/libnccl.so.2")).unwrap_err().to_string();
    assert!(none.starts_with("there is no NCCL: ") && none.contains("install it"), "{none}");
    let Some(driver) = mock::library() else { return };
    let other = Nccl::open(driver).unwrap_err().to_string();
    assert!(other.contains("ncclGetVersion"), "{other}");
}

#[test]
fn a_token_outside_the_table_is_told_when_something_is_read() {
    let Some(mock) = Mock::new() else { return };
    let card = mock.card().unwrap();
    let device = Cuda::new(&card, 1 << 20).unwrap();
    let (tokens, table) = (tensor(&device, DType::U32, &[3]), tensor(&device, DType::F32, &[11, 2]));
    let out = tensor(&device, DType::F32, &[3, 2]);
    device.write_f32(&table, &[1.0; 22]).unwrap();
    let look_up = |numbers: [u32; 3]| {
        device.write_u32(&tokens, &numbers).unwrap();
        device.run(Embedding::Lookup { tokens: &tokens, table: &table, out: &out }).unwrap();
        device.read_f32(&out)
    };
    let error = look_up([3, 11, 12]).unwrap_err().to_string();
    assert_eq!(error, "embedding: the token at 1 is outside t f32[11, 2]");
    assert_eq!(look_up([3, 0, 10]).unwrap(), [1.0; 6]);
}

#[test]
fn nothing_is_written_where_a_flag_says_so() {
    let Some(mock) = Mock::new() else { return };
    let card = mock.card().unwrap();
    let device = Cuda::new(&card, 1 << 20).unwrap();
    let (flag, x) = (tensor(&device, DType::F32, &[1]), tensor(&device, DType::F32, &[5]));
    for (value, expected) in [(0.0, 1.0), (1.0, 2.0)] {
        device.write_f32(&flag, &[value]).unwrap();
        device.write_f32(&x, &[1.0; 5]).unwrap();
        device.run_unless_zero(&flag, Elementwise::Fill { out: &x, value: 2.0 }).unwrap();
        assert_eq!(device.read_f32(&x).unwrap(), [expected; 5]);
    }
    let other = Cuda::new(&card, 1 << 20).unwrap();
    assert!(device.read_f32(&tensor(&other, DType::F32, &[5])).is_err());
    assert!(device.lend(tensor(&other, DType::U8, &[5])).is_err());
}

/// What no kernel can do is refused by the plan, before anything is computed.
#[test]
fn a_plan_for_a_gpu_refuses_what_it_cannot_do() {
    let ratios = |device: &Dry, channels: u64| {
        let [a, b] = [0, 1].map(|_| tensor(device, DType::F32, &[1, channels]));
        let out = tensor(device, DType::F32, &[channels]);
        let (a, b, out) = (&a, &b, &out);
        device.run(Subspace::NormRatios { a, b, out, channels: Channels::Columns, epsilon: 1e-8 })
    };
    let gpu = Dry::new().standing_for(DeviceTraits::CUDA);
    assert!(ratios(&gpu, 1 << 20).is_ok());
    let error = ratios(&gpu, 2 << 20).unwrap_err().to_string();
    assert_eq!(
        error,
        "norm_ratios does not run on NVIDIA cards yet (its partial sums need more workspace than there is); use \
         `--device cpu`"
    );
    assert!(ratios(&Dry::new(), 2 << 20).is_ok());
}

/// A card that multiplies whole tiles does without where its driver does not take these kernels.
#[test]
fn products_of_whole_tiles_are_those_of_an_older_driver() {
    let Some(mock) = Mock::new() else { return };
    let product = |driver| {
        mock.machine(1, 90, driver, 8 << 30);
        let card = mock.card().unwrap();
        let device = Cuda::new(&card, 1 << 20).unwrap();
        let [x, weight, out] =
            [[40, 64], [136, 64], [40, 136]].map(|sizes| tensor(&device, DType::Bf16, &sizes));
        for (t, seed) in [(&x, 1u32), (&weight, 7)] {
            // Halves from -4 to 4: sums are exact.
            let halves = (0..t.elements() as u32)
                .map(|i| (i.wrapping_mul(seed.wrapping_mul(2_654_435_761)) >> 28) as f32 / 2.0 - 4.0);
            let bits: Vec<u8> = halves.flat_map(|x| ((x.to_bits() >> 16) as u16).to_ne_bytes()).collect();
            device.write(t, &mut |bytes| bytes.copy_from_slice(&bits)).unwrap();
        }
        let (bias, accumulate, compute) = (None, false, Compute::Bf16);
        let product = Product::Linear { x: &x, weight: &weight, bias, out: &out, accumulate, compute };
        device.run(product).unwrap();
        let mut bytes = Vec::new();
        device.read(&out, &mut |x| bytes = x.to_vec()).unwrap();
        bytes
    };
    let [older, newer] = [11_080, 12_040].map(product);
    assert!(older == newer);
    assert!(newer.iter().any(|byte| *byte != 0));
}

#[test]
fn the_shipped_kernels_are_those_of_the_sources() {
    let shared = SOURCES.iter().filter(|(name, _)| SHARED_80.contains(name));
    let all: Vec<&str> = SOURCES.iter().map(|(_, source)| *source).collect();
    let for_tensor_cores: Vec<&str> = shared.chain(&SOURCES_80).map(|(_, source)| *source).collect();
    let shared = SOURCES.iter().chain(&SOURCES_80).filter(|(name, _)| SHARED_90.contains(name));
    let for_whole_tiles: Vec<&str> = shared.chain(&SOURCES_90).map(|(_, source)| *source).collect();
    for (sources, ptx) in [
        (all, include_str!("../src/cuda/kernels.ptx")),
        (for_tensor_cores, include_str!("../src/cuda/kernels_80.ptx")),
        (for_whole_tiles, include_str!("../src/cuda/kernels_90.ptx")),
    ] {
        let mut hasher = Sha256::new();
        sources.iter().for_each(|source| hasher.update(source.as_bytes()));
        let hash: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            ptx.lines().next(),
            Some(&*format!("// sources: sha256 {hash}")),
            "the kernels are stale: run docs/bench/gpu_kernels.py"
        );
    }
}
