//! A dry PyTorch in eager mode: tensors with shapes and storages but no numbers, autograd as PyTorch has it, and the
//! operations with what each allocates and saves. A storage is freed when the last reference to it goes, as there.
//!
//! Formulas are those of `tools/autograd/derivatives.yaml`; the head of each file of `ops` names what it follows.
//! What a model does with them is left to `model`, the order of a process to `program`.

mod autocast;
mod checkpoint;
mod engine;
mod graph;
mod memory;
mod ops;
mod shape;
mod tensor;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

pub use memory::{Event, Highest, Memory, Storage};
pub(crate) use ops::FourBitForm;
pub use ops::Unary;
pub use ops::attention::{Backend, choose_backend};
pub use shape::Dims;
pub use tensor::Tensor;

use crate::estimate::Kind;
use crate::run::{Card, TorchType, Versions};
use autocast::Casts;
use checkpoint::Packing;
pub(crate) use checkpoint::Segment;
use memory::Place;

/// A tensor that a node saved: size and type, as `saved_tensors_hooks` shows them.
pub type SavedNote = (Vec<u64>, TorchType);

/// The state of a process that runs PyTorch.
pub struct Torch {
    memory: Rc<Memory>,
    card: Card,
    versions: Versions,
    grad_enabled: Cell<bool>,
    sequence: Cell<u64>,
    packing: RefCell<Option<Packing>>,
    casts: RefCell<Option<Casts>>,
    /// Behind the last tensor that a recomputation needs nothing is computed: PyTorch throws there.
    stopped: Cell<bool>,
    scope: RefCell<Rc<str>>,
    in_backward: Cell<bool>,
    kind: Cell<Kind>,
    workspaces: RefCell<[Option<Rc<Storage>>; 2]>,
    saved: RefCell<Option<Vec<SavedNote>>>,
    /// Whether tensors are those of a tracer (`FakeTensor`), which are never summed in place.
    traced: Cell<bool>,
}

impl Torch {
    /// A process with nothing in it.
    pub fn new(memory: Rc<Memory>, card: Card, versions: Versions) -> Torch {
        Torch {
            memory,
            card,
            versions,
            grad_enabled: Cell::new(true),
            sequence: Cell::new(0),
            packing: RefCell::default(),
            casts: RefCell::default(),
            stopped: Cell::new(false),
            scope: RefCell::new("".into()),
            in_backward: Cell::new(false),
            kind: Cell::new(Kind::Temporary),
            workspaces: RefCell::default(),
            saved: RefCell::default(),
            traced: Cell::new(false),
        }
    }

    /// Its memory.
    pub fn memory(&self) -> &Rc<Memory> {
        &self.memory
    }

    /// The card that it computes on.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Versions of its libraries.
    pub fn versions(&self) -> &Versions {
        &self.versions
    }

    /// A new tensor, contiguous.
    pub fn empty(&self, shape: &[u64], dtype: TorchType, operation: &'static str) -> Tensor {
        self.empty_as(&Dims::new(shape), dtype, operation)
    }

    pub(crate) fn empty_as(&self, shape: &Dims, dtype: TorchType, operation: &'static str) -> Tensor {
        self.empty_strided(shape, &shape.contiguous_strides(), dtype, operation)
    }

    /// A new tensor whose elements fill a stretch of memory in the order that `strides` give.
    pub(crate) fn empty_strided(
        &self,
        shape: &Dims,
        strides: &Dims,
        dtype: TorchType,
        operation: &'static str,
    ) -> Tensor {
        let storage = self.storage(shape.elements() * dtype.bytes(), operation, false);
        Tensor { storage, shape: *shape, strides: *strides, dtype, history: tensor::History::None }
    }

    fn storage(&self, bytes: u64, operation: &'static str, hidden: bool) -> Rc<Storage> {
        let bytes = if self.stopped.get() { 0 } else { bytes };
        let place = Place { scope: self.scope(), backward: self.in_backward.get(), operation };
        self.memory.allocate(bytes, self.kind.get(), hidden, place)
    }

    /// Bytes that a kernel takes for itself.
    pub(crate) fn scratch(&self, bytes: u64, operation: &'static str) -> Rc<Storage> {
        self.storage(bytes, operation, true)
    }

    /// Everything made by `work` is of this kind.
    pub fn of_kind<T>(&self, kind: Kind, work: impl FnOnce() -> T) -> T {
        let outer = self.kind.replace(kind);
        let out = work();
        self.kind.set(outer);
        out
    }

    /// `torch.no_grad()`
    pub fn no_grad<T>(&self, work: impl FnOnce() -> T) -> T {
        let outer = self.grad_enabled.replace(false);
        let out = work();
        self.grad_enabled.set(outer);
        out
    }

    /// A checkpointed segment once more, in the module where it ran first: with gradients, and an autocast of its own, whose
    /// cache ends with it.
    fn again<T>(&self, (module, autocast): &Surroundings, work: impl FnOnce() -> T) -> T {
        let (grad, backward) = (self.grad_enabled.replace(true), self.in_backward.replace(false));
        let scope = self.scope();
        let casts = self.casts.replace(autocast.map(Casts::new));
        self.set_scope(module);
        let out = work();
        self.casts.replace(casts);
        self.set_scope(&scope);
        self.grad_enabled.set(grad);
        self.in_backward.set(backward);
        self.stopped.set(false);
        out
    }

    /// `torch.device("meta")`: tensors that are made have sizes and no bytes.
    pub(crate) fn on_meta<T>(&self, work: impl FnOnce() -> T) -> T {
        let outer = self.stopped.replace(true);
        let out = work();
        self.stopped.set(outer);
        out
    }

    /// The tensor itself, with something that happens in the backward pass once its gradient is complete.
    pub(crate) fn with_backward_hook(
        &self,
        name: &'static str,
        tensor: &Tensor,
        hook: impl Fn(&Torch) + 'static,
    ) -> Tensor {
        self.recorded(name, &[tensor], tensor.detach(), |_| {
            Box::new(move |torch, grads| {
                hook(torch);
                grads.to_vec()
            })
        })
    }

    /// The module that runs: `layers.3.mlp`, a part of the one that runs already.
    pub fn module<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let outer = self.scope();
        let scope = if outer.is_empty() { name.into() } else { format!("{outer}.{name}").into() };
        self.set_scope(&scope);
        let out = work();
        self.set_scope(&outer);
        out
    }

    /// What a checkpointed segment will run in once more.
    fn surroundings(&self) -> Surroundings {
        (self.scope(), self.autocast_type())
    }

    fn scope(&self) -> Rc<str> {
        Rc::clone(&self.scope.borrow())
    }

    fn set_scope(&self, scope: &Rc<str>) {
        *self.scope.borrow_mut() = Rc::clone(scope);
    }

    fn stop(&self) {
        self.stopped.set(true);
    }

    fn grad_enabled(&self) -> bool {
        self.grad_enabled.get()
    }

    fn next_sequence(&self) -> u64 {
        self.sequence.replace(self.sequence.get() + 1)
    }

    fn packing(&self) -> Option<Packing> {
        self.packing.borrow().clone()
    }

    fn set_packing(&self, packing: Option<Packing>) -> Option<Packing> {
        self.packing.replace(packing)
    }

    fn enter_backward(&self) -> BackwardState {
        let casts = self.casts.take();
        (
            self.grad_enabled.replace(false),
            self.in_backward.replace(true),
            self.scope(),
            casts,
            self.set_packing(None),
        )
    }

    fn leave_backward(&self, (grad, backward, scope, casts, packing): BackwardState) {
        self.grad_enabled.set(grad);
        self.in_backward.set(backward);
        self.set_scope(&scope);
        self.casts.replace(casts);
        self.set_packing(packing);
    }

    /// Does what PyTorch does with the tensors of a tracer, which are of a subclass.
    pub fn as_traced(&self) {
        self.traced.set(true);
    }

    /// Keeps a list of the tensors that nodes save from now on.
    pub fn list_saved(&self) {
        *self.saved.borrow_mut() = Some(Vec::new());
    }

    /// The list, taken away.
    pub fn take_saved(&self) -> Vec<SavedNote> {
        self.saved.take().unwrap_or_default()
    }

    fn note_saved(&self, tensor: &Tensor) {
        if let Some(list) = self.saved.borrow_mut().as_mut() {
            list.push((tensor.shape.to_vec(), tensor.dtype));
        }
    }

    /// cuBLAS has a workspace for each thread that calls it, from the caching allocator
    /// (`aten/src/ATen/cuda/CublasHandlePool.cpp`): 4096 KiB twice and 16 KiB eight times, 32 MiB on Hopper and later.
    fn use_cublas(&self) {
        if self.stopped.get() {
            return;
        }
        let mut workspaces = self.workspaces.borrow_mut();
        let workspace = &mut workspaces[usize::from(self.in_backward.get())];
        if workspace.is_none() {
            let (major, _) = self.card.capability;
            let bytes = if major >= 9 { 32 << 20 } else { (2 * 4096 + 8 * 16) << 10 };
            let made = self.scratch(bytes, "cublas workspace");
            made.set_kind(Kind::Workspace);
            *workspace = Some(made);
        }
    }
}

/// The module and the autocast that a checkpointed segment runs in.
type Surroundings = (Rc<str>, Option<TorchType>);

type BackwardState = (bool, bool, Rc<str>, Option<Casts>, Option<Packing>);
