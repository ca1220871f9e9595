package weights

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// mostPercent is how much of the memory the weights may take. The server that then loads them needs some for itself, and a page
// cache that cannot hold all of the weights is of little use: they are read in one order each time, and what was read
// longest ago goes first.
const mostPercent = 70

// Warm reads the files into the page cache, but for what is there already. memory is how many bytes may be used: what is free or
// can be reclaimed, in the machine and under the limit of the cgroup, to which the page cache is charged. Files that would
// take more than 70 % of it are not read, which is no error; Report.Skipped says why.
//
// progress, which may be nil, is told how many bytes are done, by one goroutine at a time. Warm ends with the cause of ctx when
// that ends, after the reads at hand: up to four of 8 MiB. A file server that hangs holds them, and it, up.
func Warm(ctx context.Context, files []File, memory int64, progress func(done, total int64)) (report Report, err error) {
	began := time.Now()
	defer func() { report.Took = time.Since(began) }()
	report = Report{Bytes: sum(files), WasResident: -1, NowResident: -1}
	if report.Bytes > memory/100*mostPercent {
		report.Skipped = fmt.Sprintf("the weights take %s, more than %d %% of the %s of memory that may be used",
			sizeText(report.Bytes), mostPercent, sizeText(memory))
		return report, nil
	}
	if report.WasResident, err = known(files); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	if report.WasResident == report.Bytes {
		report.NowResident, report.Skipped = report.Bytes, "all of the weights were in the page cache"
		return report, nil
	}
	if report.Read, err = readMissing(ctx, files, report.WasResident >= 0, &tally{total: report.Bytes, tell: progress}); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	if report.NowResident, err = known(files); err != nil {
		return report, fmt.Errorf("warm the page cache: %w", err)
	}
	return report, nil
}

// known is Resident, but -1 where that cannot be known.
func known(files []File) (int64, error) {
	n, err := Resident(files)
	if errors.Is(err, ErrHidden) {
		return -1, nil
	}
	return n, err
}

// readMissing reads the files, or only those segments of which something is missing, and returns how many bytes it read.
func readMissing(ctx context.Context, files []File, told bool, done *tally) (int64, error) {
	var n atomic.Int64
	err := inParallel(ctx, segments(files), func(ctx context.Context, s segment, buffer []byte) error {
		path := files[s.file].Path
		if told {
			resident, err := residentIn(path, s.offset, s.length)
			if err != nil {
				return err
			}
			if resident == s.length {
				done.add(s.length)
				return nil
			}
		}
		return read(ctx, path, s, buffer, func(block []byte, _ int64) error {
			n.Add(int64(len(block)))
			done.add(int64(len(block)))
			return nil
		})
	})
	return n.Load(), err
}
