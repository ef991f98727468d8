//! How ranks stand to each other: which take other micro-batches, which other tokens of the same sequences.

use std::ops::Range;

/// Ranks along each way in which work is divided. Those that share sequences are neighbours, and so are those that hold the same
/// weights or shares of them: the stages of a pipeline are furthest from each other, since they have least to say. Those that share
/// every product, or have different experts, have most, and are next to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mesh {
    /// Groups of ranks that take other micro-batches than each other (data parallelism).
    pub data: u32,
    /// Of so many of them, each has other experts (expert parallelism); divides `data`. Those that share every product have different
    /// experts anyway.
    pub expert: u32,
    /// Ranks of such a group, which each have a part of every sequence (context parallelism).
    pub context: u32,
    /// Stages that a model's layers are divided into (pipeline parallelism).
    pub pipeline: u32,
    /// Ranks that share every product (tensor parallelism).
    pub tensor: u32,
}

/// Where a rank is in a mesh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MeshPlace {
    /// Which micro-batches are its own.
    pub data: u32,
    /// Which part of their sequences.
    pub context: u32,
    /// Which layers.
    pub stage: u32,
    /// Which part of every product.
    pub tensor: u32,
    /// Which experts, where ranks with other micro-batches have others.
    pub expert: u32,
}

impl MeshPlace {
    /// Its number among the ranks next to it that have different parts of layers.
    pub fn part(self) -> u32 {
        self.tensor.max(self.expert)
    }

    /// Whether it is the first of the ranks that work on the same micro-batches, and speaks for them.
    pub fn leads(self) -> bool {
        self.context == 0 && self.stage == 0 && self.tensor == 0
    }
}

impl Mesh {
    /// One rank.
    pub const ALONE: Mesh = Mesh { data: 1, expert: 1, context: 1, pipeline: 1, tensor: 1 };

    /// Ranks that each take their own micro-batches.
    pub fn of_data(data: u32) -> Mesh {
        Mesh { data, ..Mesh::ALONE }
    }

    /// All ranks.
    pub fn size(self) -> u32 {
        self.replicas().saturating_mul(self.pipeline.max(1)).saturating_mul(self.parts())
    }

    /// Ranks that hold the same weights, or shares of them.
    pub fn replicas(self) -> u32 {
        (self.data.max(1) / self.expert.max(1)).max(1).saturating_mul(self.context.max(1))
    }

    /// Ranks next to each other that have different parts of layers: of every product, or other experts.
    pub fn parts(self) -> u32 {
        self.tensor.max(1).saturating_mul(self.expert.max(1))
    }

    /// Where a rank is.
    pub fn place(self, rank: u32) -> MeshPlace {
        let (experts, context) = (self.expert.max(1), self.context.max(1));
        let (part, replica) = (rank % self.parts(), rank / self.parts());
        let (expert, tensor) = (part % experts, part / experts);
        let (replica, stage) = (replica % self.replicas(), replica / self.replicas());
        let data = replica / context * experts + expert;
        MeshPlace { data, context: replica % context, stage, tensor, expert }
    }

    /// The rank of a stage, of the ranks that hold the same weights, and of those that have different parts of layers.
    pub fn rank(self, stage: u32, replica: u32, part: u32) -> u32 {
        (stage * self.replicas() + replica) * self.parts() + part
    }

    /// The number of a rank among those that hold the same weights.
    pub fn replica(self, rank: u32) -> u32 {
        rank / self.parts() % self.replicas()
    }

    /// The places in a sequence of `length` tokens that a rank of a context group has: one run of them near the beginning, whose
    /// queries see little, and one as near the end, whose queries see much. So all ranks of a group have as much to do.
    pub fn runs(self, context: u32, length: u64) -> Vec<Range<u64>> {
        let ranks = u64::from(self.context.max(1));
        if ranks == 1 {
            let whole = 0..length;
            return vec![whole];
        }
        let (context, cuts) = (u64::from(context), 2 * ranks);
        let cut = |number: u64| (u128::from(length) * u128::from(number) / u128::from(cuts)) as u64;
        let run = |number: u64| cut(number)..cut(number + 1);
        let runs = [run(context), run((cuts - 1).saturating_sub(context))];
        runs.into_iter().filter(|run| !run.is_empty()).collect()
    }

    /// The ranks that have parts of the same sequences as a rank, in the order of the parts.
    pub fn context_group(self, rank: u32) -> Vec<u32> {
        let at = self.place(rank);
        let first = self.replica(rank) - at.context;
        let all = first..first + self.context.max(1);
        all.map(|replica| self.rank(at.stage, replica, at.part())).collect()
    }

    /// The ranks that hold the same weights as a rank.
    pub fn replica_group(self, rank: u32) -> Vec<u32> {
        let at = self.place(rank);
        (0..self.replicas()).map(|replica| self.rank(at.stage, replica, at.part())).collect()
    }

    /// The ranks that micro-batches of a rank go through, in the order of the stages.
    pub fn stage_group(self, rank: u32) -> Vec<u32> {
        let (replica, part) = (self.replica(rank), self.place(rank).part());
        (0..self.pipeline.max(1)).map(|stage| self.rank(stage, replica, part)).collect()
    }

    /// The ranks that share every product with a rank, or have other experts of the same layers.
    pub fn parts_group(self, rank: u32) -> Vec<u32> {
        let (replica, MeshPlace { stage, .. }) = (self.replica(rank), self.place(rank));
        (0..self.parts()).map(|part| self.rank(stage, replica, part)).collect()
    }

    /// The ranks that have the whole model between them, of which a rank is one: those of a stage together.
    pub fn model_group(self, rank: u32) -> Vec<u32> {
        self.stage_group(rank).into_iter().flat_map(|rank| self.parts_group(rank)).collect()
    }
}

impl Default for Mesh {
    fn default() -> Self {
        Mesh::ALONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_in_one_run() {
        for (context, length) in [(1, 5), (2, 16), (3, 17), (4, 5), (8, 1000)] {
            let mesh = Mesh { context, ..Mesh::ALONE };
            let mut all: Vec<u64> = (0..context).flat_map(|rank| mesh.runs(rank, length)).flatten().collect();
            all.sort_unstable();
            assert_eq!(all, (0..length).collect::<Vec<_>>(), "{context} {length}");
        }
        let mesh = Mesh { context: 2, ..Mesh::ALONE };
        assert_eq!((mesh.runs(0, 8), mesh.runs(1, 8)), (vec![0..2, 6..8], vec![2..4, 4..6]));
    }

    #[test]
    fn each_rank_has_a_place_and_a_group_of_its_own() {
        let mesh = Mesh { data: 2, context: 3, pipeline: 2, ..Mesh::ALONE };
        assert_eq!((mesh.size(), Mesh::ALONE.size(), Mesh::of_data(4).size()), (12, 1, 4));
        let places: Vec<_> = (0..6).map(|rank| mesh.place(rank)).map(|at| (at.data, at.context)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        assert_eq!((mesh.place(10).data, mesh.place(10).context, mesh.place(10).stage), (1, 1, 1));
        assert_eq!((mesh.context_group(1), mesh.context_group(11)), (vec![0, 1, 2], vec![9, 10, 11]));
        assert_eq!((mesh.replica_group(2), mesh.replica_group(7)), ((0..6).collect(), (6..12).collect()));
        assert_eq!((mesh.stage_group(1), mesh.stage_group(10)), (vec![1, 7], vec![4, 10]));
        assert_eq!(Mesh::of_data(4).context_group(2), [2]);
        let mesh = Mesh { data: 2, pipeline: 2, tensor: 3, ..Mesh::ALONE };
        for mesh in [mesh, Mesh { data: 6, expert: 3, pipeline: 2, ..Mesh::ALONE }] {
            assert_eq!((mesh.size(), mesh.replicas(), mesh.parts()), (12, 2, 3));
            for rank in 0..12 {
                let at = mesh.place(rank);
                assert_eq!(mesh.rank(at.stage, mesh.replica(rank), at.part()), rank);
            }
        }
        assert_eq!((mesh.parts_group(4), mesh.replica_group(4)), (vec![3, 4, 5], vec![1, 4]));
        assert_eq!((mesh.stage_group(4), mesh.model_group(4)), (vec![4, 10], vec![3, 4, 5, 9, 10, 11]));
        // Neighbours have other experts and other micro-batches; all places of a sequence are with ranks of the same experts.
        let mesh = Mesh { data: 4, expert: 2, context: 2, ..Mesh::ALONE };
        let places: Vec<_> =
            (0..8).map(|rank| mesh.place(rank)).map(|at| (at.data, at.context, at.expert)).collect();
        assert_eq!(places[..4], [(0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 1)]);
        assert_eq!(places[4..], [(2, 0, 0), (3, 0, 1), (2, 1, 0), (3, 1, 1)]);
        assert_eq!((mesh.replica_group(3), mesh.parts_group(3)), (vec![1, 3, 5, 7], vec![2, 3]));
        assert_eq!((mesh.context_group(5), places[5]), (vec![5, 7], (3, 0, 1)));
    }
}
