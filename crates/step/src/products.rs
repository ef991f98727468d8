//! Products that several ranks share (Megatron-LM, Shoeybi et al. 2019). Each has some heads and a part of the feed-forward width, and
//! some rows of the tables of the vocabulary. What goes into a layer's halves and comes out of them is whole on every rank: outputs of
//! the halves, and the gradients of their inputs, are added up over the ranks.

use plimsoll_device::{Collective, Communicated, Device, DeviceExt, Elementwise, Rounding, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::Role;
use plimsoll_parallel::Communicator;

use crate::StepError;
use crate::head::reshaped;

/// The ranks that share every product with this one.
pub(crate) struct Products<'a> {
    ranks: Box<dyn Communicator + 'a>,
    /// The rows of the tables that this one has, where it does not have all.
    pub vocabulary: Option<(u64, u64)>,
}

impl<'a> Products<'a> {
    pub fn new(ranks: Box<dyn Communicator + 'a>, vocabulary: Option<(u64, u64)>) -> Self {
        Products { ranks, vocabulary }
    }

    /// All of them.
    pub fn ranks(&self) -> &dyn Communicator {
        &*self.ranks
    }

    /// Whether this is the first of them.
    pub fn is_first(&self) -> bool {
        self.ranks.rank() == 0
    }

    /// The number of the first row of the tables.
    pub fn first_row(&self) -> u64 {
        self.vocabulary.map_or(0, |(start, _)| start)
    }

    /// Whether this rank adds a bias: one of them does, where products are added up.
    pub fn adds_bias(&self, role: Role) -> bool {
        !matches!(role, Role::OProj | Role::DownProj) || self.is_first()
    }

    /// x becomes the sum of what all ranks have of x, in the order of the ranks. Each adds up a share, which all others then get.
    pub fn sum(&self, device: &dyn Device, x: &Tensor) -> Result<(), StepError> {
        let ranks = &*self.ranks;
        let (rank, size, all) = (ranks.rank(), ranks.size(), x.elements());
        let flat = reshaped(x, &[all, 1])?;
        let cut = |rank: u32| (u128::from(all) * u128::from(rank) / u128::from(size.max(1))) as u64;
        let share =
            |rank: u32| flat.slice_rows(cut(rank)..cut(rank + 1)).filter(|share| share.elements() > 0);
        let (own, others) = (share(rank), u64::from(size.saturating_sub(1)));
        let received = match &own {
            Some(own) => {
                let sizes = [others * own.elements(), 1];
                Some(device.alloc(x.dtype(), &sizes, Tag::Communication, "products.received")?)
            }
            None => None,
        };
        let term = |from: u32| {
            let place = u64::from(if from < rank { from } else { from - 1 });
            let length = own.as_ref()?.elements();
            received.as_ref()?.slice_rows(place * length..(place + 1) * length)
        };
        let bytes = x.bytes() - own.as_ref().map_or(0, Tensor::bytes);
        let messages = (0..size).filter(|other| *other != rank && share(*other).is_some()).count() as u64;
        let sent = Communicated::of_many(Collective::AllReduce, bytes, messages);
        ranks.all_to_all(device, Collective::AllReduce, sent, &share, &term)?;
        if let Some(own) = &own {
            let terms = (0..size).map(|of| if of == rank { Some(own.clone()) } else { term(of) });
            let missing = StepError::Invariant { what: "a product has no term of a rank" };
            let terms = terms.collect::<Option<Vec<Tensor>>>().ok_or(missing)?;
            let mut sum: Option<Tensor> = None;
            for term in terms {
                if let Some(sum) = &sum {
                    device.run(Elementwise::Add { a: sum, b: &term, out: &term })?;
                }
                sum = Some(term);
            }
            if let Some(sum) = sum.filter(|_| rank + 1 != size) {
                device.run(Elementwise::Cast { x: &sum, out: own, rounding: Rounding::Nearest })?;
            }
        }
        Ok(ranks.all_gather(device, Collective::AllReduce, &share)?)
    }
}
