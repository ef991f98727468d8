//! A pool whose carrier says what it was asked for, in order.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use plimsoll_device::{Cpu, CpuOptions};
use plimsoll_disk::ALIGNMENT;

use super::*;

/// What a carrier did.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Did {
    Read(u32),
    Wrote(u32, u8),
    /// Somebody waited for it.
    Waited(u32),
}

struct World<'a> {
    device: &'a Cpu,
    did: Vec<Did>,
    /// What lives in the homes.
    homes: HashMap<u32, u8>,
    under_way: HashMap<u32, (Tensor, Direction)>,
    broken: Option<u32>,
    failed: bool,
}

impl World<'_> {
    /// A move ends. What is written arrives then, not before.
    fn end(&mut self, key: u32) -> (Tensor, Result<(), DiskError>) {
        let (tensor, direction) = self.under_way.remove(&key).unwrap();
        if direction == Direction::WriteBack {
            self.homes.insert(key, value(self.device, &tensor));
        }
        let outcome = if self.broken == Some(key) { Err(DiskError::Stopped) } else { Ok(()) };
        (tensor, outcome)
    }
}

struct Slow<'a>(Rc<RefCell<World<'a>>>);

impl Carrier<u32> for Slow<'_> {
    /// The parcel that moves.
    type Transit = u32;

    fn has(&self, _: u32) -> bool {
        true
    }

    fn begin(&mut self, key: u32, direction: Direction, source: Source<u32>) -> Result<u32, StepError> {
        let mut world = self.0.borrow_mut();
        let tensor = match source {
            Source::Buffer(tensor) => tensor,
            Source::Behind(before) => {
                let (tensor, outcome) = world.end(before);
                world.failed |= outcome.is_err();
                tensor
            }
        };
        assert!(tensor.is_alone(), "{key} moves while somebody sees its buffer");
        match direction {
            Direction::Prefetch => {
                world.did.push(Did::Read(key));
                let value = world.homes.get(&key).copied().unwrap_or(0);
                world.device.write(&tensor, &mut |bytes| bytes.fill(value)).unwrap();
            }
            Direction::WriteBack => {
                let value = value(world.device, &tensor);
                world.did.push(Did::Wrote(key, value));
            }
        }
        assert!(world.under_way.insert(key, (tensor, direction)).is_none(), "{key} moves twice at once");
        Ok(key)
    }

    fn finish(&mut self, key: u32) -> Result<(Tensor, Result<(), DiskError>), StepError> {
        let mut world = self.0.borrow_mut();
        let ended = world.end(key);
        world.did.push(Did::Waited(key));
        Ok(ended)
    }

    fn settle(&mut self) -> Result<(), DiskError> {
        if std::mem::take(&mut self.0.borrow_mut().failed) { Err(DiskError::Stopped) } else { Ok(()) }
    }
}

fn cpu() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap()
}

type SlowPool<'a> = Pool<'a, u32, Slow<'a>>;

fn pool(device: &Cpu, count: usize) -> (SlowPool<'_>, Rc<RefCell<World<'_>>>) {
    let homes = (0..10).map(|key| (key, key as u8 + 100)).collect();
    let (did, under_way) = (Vec::new(), HashMap::new());
    let world = World { device, did, homes, under_way, broken: None, failed: false };
    let world = Rc::new(RefCell::new(world));
    let carrier = Slow(Rc::clone(&world));
    (Pool::new(device, carrier, "tests.staging", ALIGNMENT, count).unwrap(), world)
}

fn announce(pool: &mut SlowPool<'_>, keys: &[u32]) {
    pool.announce(keys.iter().copied().map(Use::of)).unwrap();
}

fn anew(key: u32) -> Use<u32> {
    Use { key, fresh: true }
}

fn take_and_release(pool: &mut SlowPool<'_>, device: &Cpu, key: u32) -> u8 {
    let value = take(pool, device, key);
    pool.release(key, false);
    value
}

fn take(pool: &mut SlowPool<'_>, device: &Cpu, key: u32) -> u8 {
    value(device, &pool.take(key).unwrap().unwrap())
}

fn value(device: &Cpu, tensor: &Tensor) -> u8 {
    let mut last = 0;
    device.read(tensor, &mut |bytes| last = *bytes.last().unwrap()).unwrap();
    last
}

fn did(world: &Rc<RefCell<World<'_>>>) -> Vec<Did> {
    std::mem::take(&mut world.borrow_mut().did)
}

#[test]
fn what_is_announced_is_brought_in_its_order() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[4, 2, 7, 2, 9]);
    // As many as there are buffers.
    assert_eq!(did(&world), [Did::Read(4), Did::Read(2)]);
    assert_eq!(take(&mut pool, &device, 4), 104);
    assert_eq!(did(&world), [Did::Waited(4)]);
    pool.release(4, false);
    pool.advance().unwrap();
    assert_eq!(did(&world), [Did::Read(7)]);
    for (key, next) in [(2, None), (7, Some(9)), (2, None), (9, None)] {
        assert_eq!(take(&mut pool, &device, key), key as u8 + 100);
        pool.release(key, false);
        pool.advance().unwrap();
        let begun: Vec<Did> = did(&world).into_iter().filter(|did| matches!(did, Did::Read(_))).collect();
        assert_eq!(begun, next.map(Did::Read).into_iter().collect::<Vec<_>>(), "after {key}");
    }
}

#[test]
fn what_nobody_announced_is_not_given() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[1, 2]);
    did(&world);
    for key in [2, 3] {
        assert!(matches!(pool.take(key), Err(StepError::Invariant { .. })), "{key}");
    }
    assert_eq!(did(&world), []);
    assert_eq!([1, 2].map(|key| take(&mut pool, &device, key)), [101, 102]);
    assert!(matches!(pool.take(3), Err(StepError::Invariant { .. })));
}

#[test]
fn what_is_written_anew_is_not_brought_and_has_its_buffer() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    pool.announce([anew(1), Use::of(2), Use::of(3), Use::of(1)]).unwrap();
    // One buffer is for 1, which does not come before it was written.
    assert_eq!(did(&world), [Did::Read(2)]);
    let one = pool.take(1).unwrap().unwrap();
    assert_eq!(did(&world), []);
    device.write(&one, &mut |bytes| bytes.fill(11)).unwrap();
    drop(one);
    pool.release(1, true);
    pool.advance().unwrap();
    assert_eq!([2, 3].map(|key| take_and_release(&mut pool, &device, key)), [102, 103]);
    assert_eq!(take(&mut pool, &device, 1), 11);
}

#[test]
fn what_comes_into_a_buffer_follows_behind_what_goes_out_of_it() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[1, 2, 3, 1]);
    let tensor = pool.take(1).unwrap().unwrap();
    device.write(&tensor, &mut |bytes| bytes.fill(77)).unwrap();
    did(&world);
    pool.release(1, true);
    // While anybody sees it, it stays.
    pool.advance().unwrap();
    assert_eq!(did(&world), []);
    drop(tensor);
    pool.advance().unwrap();
    // Nobody has waited for the way back of 1.
    assert_eq!(did(&world), [Did::Wrote(1, 77), Did::Read(3)]);
    assert_eq!(world.borrow().homes[&1], 77);
    assert_eq!([2, 3].map(|key| take(&mut pool, &device, key)), [102, 103]);
    assert_eq!(did(&world), [Did::Waited(2), Did::Waited(3)]);
    pool.release(2, false);
    pool.release(3, false);
    assert_eq!(take(&mut pool, &device, 1), 77);
}

#[test]
fn a_write_back_that_failed_is_told_when_everything_is_to_be_home() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 1);
    announce(&mut pool, &[1, 2]);
    take(&mut pool, &device, 1);
    pool.release(1, true);
    world.borrow_mut().broken = Some(1);
    pool.advance().unwrap();
    assert_eq!(take(&mut pool, &device, 2), 102);
    assert!(pool.flush().is_err());
    assert!(pool.flush().is_ok());
}

#[test]
fn what_is_taken_again_while_it_goes_back_is_not_lost() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[1, 1]);
    let tensor = pool.take(1).unwrap().unwrap();
    device.write(&tensor, &mut |bytes| bytes.fill(55)).unwrap();
    drop(tensor);
    pool.release(1, true);
    pool.advance().unwrap();
    did(&world);
    // It is still there: nothing is read.
    assert_eq!(take(&mut pool, &device, 1), 55);
    assert_eq!(did(&world), [Did::Waited(1)]);
    assert_eq!(world.borrow().homes[&1], 55);
}

#[test]
fn what_is_in_use_is_in_nobodys_way() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[1, 2, 3, 1]);
    let one = pool.take(1).unwrap().unwrap();
    let two = pool.take(2).unwrap().unwrap();
    // Both buffers are in use.
    assert!(pool.take(3).unwrap().is_none());
    assert_eq!([value(&device, &one), value(&device, &two)], [101, 102]);
    // One that is needed sooner than what would replace it stays.
    drop((one, two));
    announce(&mut pool, &[1, 3, 2]);
    did(&world);
    assert_eq!(take(&mut pool, &device, 1), 101);
    assert_eq!(did(&world), []);
}

#[test]
fn everything_changed_is_home_after_a_flush_and_nothing_else_was_sent() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 3);
    pool.announce([Use::of(1), Use::of(2), anew(3)]).unwrap();
    for (key, changed) in [(1, true), (2, false)] {
        let tensor = pool.take(key).unwrap().unwrap();
        device.write(&tensor, &mut |bytes| bytes.fill(key as u8)).unwrap();
        drop(tensor);
        pool.release(key, changed);
    }
    let fresh = pool.take(3).unwrap().unwrap();
    device.write(&fresh, &mut |bytes| bytes.fill(33)).unwrap();
    drop(fresh);
    pool.release(3, true);
    pool.flush().unwrap();
    let wrote = |did: &Did| matches!(did, Did::Wrote(..));
    assert_eq!(
        did(&world).into_iter().filter(wrote).collect::<Vec<_>>(),
        [Did::Wrote(1, 1), Did::Wrote(3, 33)]
    );
    assert_eq!([1, 2, 3].map(|key| world.borrow().homes[&key]), [1, 102, 33]);
    // A parcel that is forgotten is not sent, whatever was done to it.
    pool.announce([anew(4), Use::of(4)]).unwrap();
    let fresh = pool.take(4).unwrap().unwrap();
    drop(fresh);
    pool.release(4, true);
    pool.forget(4);
    pool.flush().unwrap();
    assert_eq!(did(&world), []);
    assert_eq!(take(&mut pool, &device, 4), 104);
}

#[test]
fn a_move_that_fails_is_an_error_and_costs_no_buffer() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 1);
    world.borrow_mut().broken = Some(2);
    announce(&mut pool, &[2]);
    assert!(pool.take(2).is_err());
    world.borrow_mut().broken = None;
    announce(&mut pool, &[2]);
    assert_eq!(take(&mut pool, &device, 2), 102);
    // The other way too.
    let tensor = pool.take(2).unwrap().unwrap();
    device.write(&tensor, &mut |bytes| bytes.fill(9)).unwrap();
    drop(tensor);
    pool.release(2, true);
    world.borrow_mut().broken = Some(2);
    assert!(pool.flush().is_err());
    world.borrow_mut().broken = None;
    announce(&mut pool, &[5]);
    assert_eq!(take(&mut pool, &device, 5), 105);
}

/// A piece that is written in parts is taken for each of them; that it comes again much later stays announced, and so does
/// what comes between.
#[test]
fn to_take_again_what_is_in_use_uses_up_no_announcement() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    announce(&mut pool, &[1, 2, 3, 1]);
    for _ in 0..3 {
        assert_eq!(take(&mut pool, &device, 1), 101);
    }
    pool.release(1, false);
    pool.advance().unwrap();
    for key in [2, 3, 1] {
        assert_eq!(take(&mut pool, &device, key), key as u8 + 100);
        pool.release(key, false);
        pool.advance().unwrap();
    }
    let reads = did(&world).into_iter().filter(|did| matches!(did, Did::Read(_))).collect::<Vec<_>>();
    assert_eq!(reads, [1, 2, 3, 1].map(Did::Read));
    // The same of what is written anew.
    pool.announce([anew(5), Use::of(6), Use::of(5)]).unwrap();
    drop(pool.take(5).unwrap().unwrap());
    device.write(&pool.take(5).unwrap().unwrap(), &mut |bytes| bytes.fill(55)).unwrap();
    pool.release(5, true);
    assert_eq!([6, 5].map(|key| take(&mut pool, &device, key)), [106, 55]);
}

#[test]
fn what_is_taken_again_on_its_way_back_does_not_lose_its_buffer() {
    let device = cpu();
    let (mut pool, _) = pool(&device, 2);
    announce(&mut pool, &[1, 1, 2, 3]);
    let tensor = pool.take(1).unwrap().unwrap();
    device.write(&tensor, &mut |bytes| bytes.fill(44)).unwrap();
    drop(tensor);
    pool.release(1, true);
    pool.advance().unwrap();
    assert_eq!([1, 2, 3].map(|key| take_and_release(&mut pool, &device, key)), [44, 102, 103]);
}

/// Nobody waits for a write-back while another buffer is free.
#[test]
fn a_buffer_that_is_being_written_back_is_the_last_to_be_used_again() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 3);
    pool.announce([Use::of(1), anew(2), anew(3), Use::of(4)]).unwrap();
    take(&mut pool, &device, 1);
    pool.release(1, true);
    did(&world);
    for key in [2, 3] {
        drop(pool.take(key).unwrap().unwrap());
        assert!(!did(&world).contains(&Did::Waited(1)), "{key}");
    }
    // What comes next has its turn in that buffer, behind the write.
    assert_eq!(take(&mut pool, &device, 4), 104);
    assert_eq!(world.borrow().homes[&1], 101);
}

/// Who has to wait for a write-back waits for the one that began first.
#[test]
fn of_buffers_that_are_being_written_back_the_first_is_used_again() {
    let device = cpu();
    let (mut pool, world) = pool(&device, 2);
    pool.announce([1, 2, 3, 4, 5].map(anew)).unwrap();
    for key in [1, 2, 3, 4, 5] {
        drop(pool.take(key).unwrap().unwrap());
        let waited = key.checked_sub(2).filter(|before| *before > 0).map(Did::Waited);
        let did: Vec<Did> = did(&world).into_iter().filter(|did| matches!(did, Did::Waited(_))).collect();
        assert_eq!(did, waited.into_iter().collect::<Vec<_>>(), "{key}");
        pool.release(key, true);
        pool.advance().unwrap();
    }
    pool.flush().unwrap();
    assert!((1..=5).all(|key| world.borrow().homes.contains_key(&key)));
}
