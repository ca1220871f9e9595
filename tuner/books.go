package tuner

import "vllmtuner/trial"

// openBooks begins to book the time of a Run. In virtual time, the work of the tuner itself takes no time. If the last
// run was killed, openBooks books the time that this run spent after its last write.
func (s *Study) openBooks() {
	s.books = *trial.NewBooks(s.Runner.Simulated)
	if !s.Runner.Simulated {
		s.Store.Spend(trial.Spent{}.Plus(trial.Spent{trial.Lost: s.Store.Killed()}))
	}
}

// settle gives the store the time since the last call. The store's next write keeps this time. Time that no trial has
// booked was spent between two trials.
func (s *Study) settle() { s.Store.Spend(s.books.Settle(trial.Choosing)) }
