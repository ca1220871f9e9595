package weights

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// maxPercent is the share of the memory that the weights may take. The server that loads them needs memory too. A
// page cache that cannot hold all of the weights is of little use: each load reads them in the same order, and the
// kernel drops the oldest pages first.
const maxPercent = 70

// Warm reads the parts of the files that are missing into the page cache. memory is how many bytes it may use: what
// is free or can be reclaimed, in the machine and under the limit of the cgroup, which pays for the page cache. Warm
// skips files that would take more than 70 % of it; this is no error, and Report.Skipped says why.
//
// vLLM maps the files and reads them in order, in one process. Where the kernel reads ahead by 128 KiB (the default
// of most file systems, and of NFS since Linux 5.4), each call to a file server takes its latency again. Warm's
// parallel reads hide it: 1 GiB at 500 MB/s loads in 2.4 s instead of 5.4 s with 0.2 ms per call, in 3.0 s instead of
// 10.1 s with 1 ms, and in 6.3 s instead of 22.9 s with 4 ms. With a readahead of 4 MiB Warm gains nothing, and costs
// 0.2 s.
//
// progress may be nil. One goroutine at a time tells it how many bytes are done. When ctx ends, Warm returns its
// cause after the reads in progress: at most four of 8 MiB. A file server that hangs delays it.
func Warm(ctx context.Context, files []File, memory int64, progress func(done, total int64)) (report Report, err error) {
	began := time.Now()
	defer func() { report.Took = time.Since(began) }()
	report = Report{Bytes: sum(files), WasResident: -1, NowResident: -1}
	if report.Bytes > memory/100*maxPercent {
		report.Skipped = fmt.Sprintf("the weights take %s, more than %d %% of the %s of memory that may be used",
			sizeText(report.Bytes), maxPercent, sizeText(memory))
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

// known is Resident, but returns -1 where the kernel does not tell.
func known(files []File) (int64, error) {
	n, err := Resident(files)
	if errors.Is(err, ErrHidden) {
		return -1, nil
	}
	return n, err
}

// readMissing reads the files and returns how many bytes it read. If residency is known, it skips segments that are
// in the page cache.
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
