//! Products that several ranks share (Megatron-LM, Shoeybi et al. 2019). Each has some heads and a part of the feed-forward width, and
//! some rows of the tables of the vocabulary. What goes into a layer's halves and comes out of them is whole on every rank: outputs of
//! the halves, and the gradients of their inputs, are added up over the ranks.
//!
//! With sequence parallelism (Korthikanti et al. 2022) the residual stream is divided between the halves: each rank has some of its rows,
//! normalises them and keeps them for the backward pass. A half gathers the rows of all ranks, and each rank gets the sum of its own rows.
//!
//! Ranks may have different experts and share nothing else: then experts alone gather and add up so, tokens of other micro-batches.

use plimsoll_device::{
    Collective, Communicated, DType, Device, DeviceExt, Elementwise, Rounding, Routing, Tensor,
};
use plimsoll_memory::Tag;
use plimsoll_model::Role;
use plimsoll_parallel::{Collectives, Communicator};

use crate::StepError;
use crate::head::reshaped;
use crate::stage::LayerParts;

/// The ranks that share every product with this one.
pub(crate) struct Products<'a> {
    ranks: Box<dyn Communicator + 'a>,
    /// The rows of the tables that this one has, where it does not have all.
    pub vocabulary: Option<(u64, u64)>,
    sharing: LayerParts,
}

impl<'a> Products<'a> {
    pub fn new(
        ranks: Box<dyn Communicator + 'a>,
        vocabulary: Option<(u64, u64)>,
        sharing: LayerParts,
    ) -> Self {
        Products { ranks, vocabulary, sharing }
    }

    /// Whether they have different experts, and share nothing else.
    pub fn shares_experts_alone(&self) -> bool {
        self.sharing == LayerParts::Experts
    }

    /// Whether each has some rows of the residual stream of so many tokens.
    pub fn shares_rows(&self, tokens: u64) -> bool {
        self.sharing == LayerParts::Products { rows: true }
            && tokens.is_multiple_of(u64::from(self.ranks.size()))
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

    /// x becomes the sum of what all ranks have of x. Each adds up a share, which all others then get.
    pub fn sum(&self, device: &dyn Device, x: &Tensor) -> Result<(), StepError> {
        let flat = reshaped(x, &[x.elements(), 1])?;
        let shares = self.shares(&flat);
        if let (Some(sum), Some(own)) =
            (self.add_up(device, &shares, Collective::AllReduce)?, shares.of(self.rank()))
            && !sum.same_memory(&own)
        {
            device.run(Elementwise::Cast { x: &sum, out: &own, rounding: Rounding::Nearest })?;
        }
        Ok(self.ranks.all_gather(device, Collective::AllReduce, &|rank| shares.of(rank))?)
    }

    /// This rank's rows of the sum of what all ranks have of x.
    pub fn sum_of_own_rows(
        &self,
        device: &dyn Device,
        x: &Tensor,
        name: &'static str,
    ) -> Result<Tensor, StepError> {
        let own = self.own_rows(x)?;
        let out = device.alloc(x.dtype(), own.shape().dims(), Tag::Activations, name)?;
        let sum = self.own_sum(device, x)?;
        device.run(Elementwise::Cast { x: &sum, out: &out, rounding: Rounding::Nearest })?;
        Ok(out)
    }

    /// The same where the sum happens to be: in x, or in what was received.
    pub fn own_sum(&self, device: &dyn Device, x: &Tensor) -> Result<Tensor, StepError> {
        let missing = StepError::Invariant { what: "a rank has no rows of a sum" };
        self.add_up(device, &self.shares(x), Collective::ReduceScatter)?.ok_or(missing)
    }

    /// The rows of all ranks, of which x has this one's.
    pub fn rows_of_all(&self, device: &dyn Device, x: &Tensor) -> Result<Tensor, StepError> {
        let sizes = [x.rows() * u64::from(self.ranks.size()), x.columns()];
        let all = device.alloc(x.dtype(), &sizes, Tag::Communication, "rows.gathered")?;
        let shares = self.shares(&all);
        let own =
            shares.of(self.rank()).ok_or(StepError::Invariant { what: "a rank has no rows to give" })?;
        match x.dtype() {
            DType::U32 => device.run(Routing::Copy { x, out: &own })?,
            _ => device.run(Elementwise::Cast { x, out: &own, rounding: Rounding::Nearest })?,
        }
        self.ranks.all_gather(device, Collective::AllGather, &|rank| shares.of(rank))?;
        Ok(all)
    }

    /// Blocks of as many rows for each rank: everybody gets its own from all, in the order of the ranks.
    pub fn exchange(&self, device: &dyn Device, x: &Tensor) -> Result<Tensor, StepError> {
        let out = device.alloc(x.dtype(), x.shape().dims(), Tag::Communication, "rows.received")?;
        let (sent, received) = (self.shares(x), self.shares(&out));
        let (Some(own), Some(kept)) = (sent.of(self.rank()), received.of(self.rank())) else {
            return Err(StepError::Invariant { what: "a rank has no rows to exchange" });
        };
        device.run(Elementwise::Cast { x: &own, out: &kept, rounding: Rounding::Nearest })?;
        let others = u64::from(self.ranks.size().saturating_sub(1));
        let within = Collective::AllToAll;
        let all = Communicated::of_many(within, others * own.bytes(), others);
        self.ranks.all_to_all(device, within, all, &|to| sent.of(to), &|from| received.of(from))?;
        Ok(out)
    }

    /// This rank's rows of x.
    pub fn own_rows(&self, x: &Tensor) -> Result<Tensor, StepError> {
        let own = self.shares(x).of(self.rank());
        own.ok_or(StepError::Invariant { what: "a rank has no rows of a tensor" })
    }

    fn rank(&self) -> u32 {
        self.ranks.rank()
    }

    fn shares<'x>(&self, x: &'x Tensor) -> RowShares<'x> {
        RowShares { x, ranks: self.ranks.size() }
    }

    /// The sum of what all ranks have of this rank's share, in the order of the ranks; none where the share is empty.
    fn add_up(
        &self,
        device: &dyn Device,
        shares: &RowShares<'_>,
        within: Collective,
    ) -> Result<Option<Tensor>, StepError> {
        let (ranks, x) = (&*self.ranks, shares.x);
        let (rank, size) = (ranks.rank(), ranks.size());
        let (own, others) = (shares.of(rank), u64::from(size.saturating_sub(1)));
        let received = match &own {
            Some(own) => {
                let sizes = [others * own.rows(), own.columns()];
                Some(device.alloc(x.dtype(), &sizes, Tag::Communication, "products.received")?)
            }
            None => None,
        };
        let term = |from: u32| {
            let place = ranks.place_of(from);
            let rows = own.as_ref()?.rows();
            received.as_ref()?.slice_rows(place * rows..(place + 1) * rows)
        };
        let bytes = x.bytes() - own.as_ref().map_or(0, Tensor::bytes);
        let messages = (0..size).filter(|other| *other != rank && shares.of(*other).is_some()).count() as u64;
        let sent = Communicated::of_many(within, bytes, messages);
        ranks.all_to_all(device, within, sent, &|to| shares.of(to), &term)?;
        let Some(own) = &own else { return Ok(None) };
        let terms = (0..size).map(|of| if of == rank { Some(own.clone()) } else { term(of) });
        let mut sum: Option<Tensor> = None;
        for term in terms {
            let term = term.ok_or(StepError::Invariant { what: "a product has no term of a rank" })?;
            if let Some(sum) = &sum {
                device.run(Elementwise::Add { a: sum, b: &term, out: &term })?;
            }
            sum = Some(term);
        }
        Ok(sum)
    }
}

/// The rows of a tensor, divided among ranks: as many for each, or one more.
struct RowShares<'x> {
    x: &'x Tensor,
    ranks: u32,
}

impl RowShares<'_> {
    /// Those of a rank; none where there are too few for it.
    fn of(&self, rank: u32) -> Option<Tensor> {
        let (rows, ranks) = (u128::from(self.x.rows()), u128::from(self.ranks.max(1)));
        let cut = |rank: u32| (rows * u128::from(rank) / ranks) as u64;
        self.x.slice_rows(cut(rank)..cut(rank + 1)).filter(|share| share.elements() > 0)
    }
}
