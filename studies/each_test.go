package studies

import (
	"errors"
	"fmt"
	"iter"
	"reflect"
	"testing"
)

// ReadEach returns the same trials as ReadSnapshot, from a base and a delta.
func TestReadEachReadsAllOfAStudy(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	const trials = trialsInMemory + 3 // more than one batch, so that two batches are read
	for number := range trials {
		try(t, s.Begin(aTrial(number)))
		if number%20 == 1 || number == trials-1 {
			try(t, s.Record(number, aProbe(0, 2)), s.Record(number, aProbe(1, 3)), s.Finish(number, aResult(2.5)))
		}
	}
	try(t, s.Close())
	want, err := ReadSnapshot(dir)
	try(t, err)
	if len(want.Trials) != trials {
		t.Fatalf("%d trials are published, want %d", len(want.Trials), trials)
	}
	for _, series := range []bool{true, false} {
		var got []Trial
		_, err := ReadEach(dir, series, func(study Study, each iter.Seq2[Trial, error]) error {
			for range 2 { // the iterator can be used twice
				got = nil
				for one, err := range each {
					try(t, err)
					got = append(got, one)
				}
			}
			if study.ID != want.ID || len(study.Trials) != trials || study.Trials[1].Probes != nil {
				t.Errorf("the study is %+v, want %s with summaries of all trials", study, want.ID)
			}
			return nil
		})
		try(t, err)
		if !reflect.DeepEqual(got, want.Trials) {
			t.Errorf("series %t: the trials are %+v, want %+v", series, got, want.Trials)
		}
	}
}

// If the callback returns an error, ReadEach does not try another snapshot, because the callback has already used
// trials of the first one.
func TestReadEachTriesOnce(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2.5)))
	try(t, s.Close())
	calls, full := 0, errors.New("the disk is full")
	_, err := ReadEach(dir, true, func(_ Study, each iter.Seq2[Trial, error]) error {
		calls++
		for range each {
			return fmt.Errorf("write: %w", full)
		}
		return nil
	})
	if !errors.Is(err, full) || calls != 1 {
		t.Errorf("ReadEach = %v after %d calls, want %v after one", err, calls, full)
	}
	_, err = ReadEach(t.TempDir()+"/none", true, nil)
	wantError(t, err, "no study")
}
