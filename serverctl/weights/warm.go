package weights

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"vllmtuner/render"
)

// maxPercent is the share of the memory that the weights may take. The server that loads them needs memory too. A
// page cache that cannot hold all of the weights is of little use: each load reads them in the same order, and the
// kernel drops the oldest pages first.
const maxPercent = 70

// Warm reads those parts of the files into the page cache that are not there yet. memory is how many bytes Warm may
// use: bytes that are free or can be reclaimed, both in the machine and under the limit of the cgroup. The page cache
// counts against that limit. Warm skips files that would take more than 70 % of memory. This is no error, and
// Report.Skipped says why.
//
// vLLM maps the files and reads them in order, in one process. Often the kernel reads ahead by only 128 KiB: this is
// the default of most file systems, and of NFS since Linux 5.4. Then each 128 KiB needs a call to the file server, with
// its latency. Warm hides the latency by parallel reads: 1 GiB at 500 MB/s loads in 2.4 s instead of 5.4 s with 0.2 ms
// per call, in 3.0 s instead of 10.1 s with 1 ms, and in 6.3 s instead of 22.9 s with 4 ms. With a readahead of 4 MiB
// Warm gains nothing, and costs 0.2 s.
//
// progress may be nil. It is called by one goroutine at a time, with the number of bytes that are done. When ctx ends,
// Warm first completes the reads in progress, at most four of 8 MiB, and then returns the cause of ctx. A file server
// that hangs delays this.
func Warm(ctx context.Context, files []File, memory int64, progress func(done, total int64)) (report Report, err error) {
	began := time.Now()
	defer func() { report.Took = time.Since(began) }()
	report = Report{Bytes: sum(files), WasResident: -1, NowResident: -1}
	if report.Bytes > memory/100*maxPercent {
		report.Skipped = fmt.Sprintf("the weights take %s, more than %d %% of the %s of memory that may be used",
			render.Bytes(report.Bytes), maxPercent, render.Bytes(memory))
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

// known is like resident, but returns -1 if the kernel does not tell.
func known(files []File) (int64, error) {
	n, err := resident(files)
	if errors.Is(err, errHidden) {
		return -1, nil
	}
	return n, err
}

// readMissing reads the files and returns how many bytes it read. If told is set, the kernel tells what is in the page
// cache, and readMissing skips segments that are there.
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
