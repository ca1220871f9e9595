package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"

	"github.com/urfave/cli/v2"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/serverctl/doctor"
	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:  "doctor",
		Usage: "check GPUs, cores, memory, limits and disk for a study",
		Description: `Shows the GPUs, cores, memory and limits of this machine or container, and
what a study would lack. It asks nvidia-smi in PATH, or a DCGM exporter, for
the GPUs. With --root it also tests whether studies are safe on that disk: it
writes a small file there and removes it. It changes nothing else.

It takes seconds, even when a driver hangs. A network disk gets 90 seconds
to answer. Exit code 1 means that figures measured here would be wrong, or
that a server could not run. Warnings alone give exit code 0.

Examples:
  tuner doctor
  tuner doctor --gpus 4 -o json
  tuner doctor --root /mnt/nfs/studies
  tuner doctor --dcgm http://10.0.0.7:9400`,
		Flags: []cli.Flag{
			formatFlag(),
			&cli.StringFlag{Name: "root", Usage: "`directory` for studies, whose disk is tested too"},
			&cli.IntFlag{Name: "gpus", Value: -1, DefaultText: "all", Usage: "`number` of GPUs that one server uses; 0 for vLLM on CPU"},
			&cli.IntFlag{Name: "streams", Value: host.DefaultStreams, Usage: "largest `number` of requests in flight at a time"},
			&cli.StringFlag{Name: "nvidia-smi", Usage: "`path` of nvidia-smi"},
			&cli.StringFlag{Name: "dcgm", Usage: "ask the DCGM exporter at this `URL`, not nvidia-smi"},
		},
		Action: func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			examination, err := examinationOf(c)
			if err != nil {
				return err
			}
			report := doctor.Examine(c.Context, examination)
			report.AddMeans()
			if root := c.String("root"); root != "" {
				disk, err := examineDisk(c.Context, root)
				report.AddStore(doctor.Store{Root: root, Mount: disk.Mount, Commit: render.InMilliseconds(disk.Commit), Text: diskText(disk)}, disk.Warnings, err)
			}
			if err := writeDocument(c.App.Writer, format, report, report.Text(render.Columns(c.App.Writer))); err != nil {
				return fmt.Errorf("write the report: %w", err)
			}
			if n := report.Count(host.Error); n > 0 {
				return fmt.Errorf("not ready: %s", render.Count(n, "error"))
			}
			return nil
		},
	}
}

// examinationOf reads the flags of doctor.
func examinationOf(c *cli.Context) (e doctor.Examination, err error) {
	if c.Args().Len() > 0 {
		return e, usage("doctor takes no argument; see `tuner doctor --help`")
	}
	smi, dcgm := c.String("nvidia-smi"), c.String("dcgm")
	if c.Int("streams") < 0 || c.IsSet("gpus") && c.Int("gpus") < 0 {
		return e, usage("--gpus and --streams: write a number of 0 or more")
	}
	switch {
	case smi != "" && dcgm != "":
		return e, usage("--nvidia-smi and --dcgm exclude each other; give one of them")
	case dcgm != "":
		address, err := url.Parse(dcgm)
		if err != nil || address.Scheme != "http" && address.Scheme != "https" || address.Host == "" {
			return e, usage("--dcgm: write a URL, such as http://10.0.0.7:9400")
		}
		e.Source, e.SourceName = &gpu.DCGM{URL: dcgm}, "dcgm"
	default:
		if smi != "" {
			switch _, err := exec.LookPath(smi); {
			case err == nil:
			case errors.Is(err, exec.ErrNotFound):
				return e, usage("--nvidia-smi %s: it is not in PATH; give its full path, such as /usr/bin/nvidia-smi", smi)
			default:
				return e, usage("--nvidia-smi %s: %s; check the path, or leave --nvidia-smi out to use the one in PATH", smi, foreign.Cause(err))
			}
		}
		e.Source, e.SourceName = &gpu.NvidiaSMI{Path: smi}, "nvidia-smi"
	}
	e.Need = host.Need{GPUs: c.Int("gpus"), GeneratorCores: 1, Streams: c.Int("streams")}
	e.Machine, e.Lookup = host.Reader{}.Read(), os.LookupEnv
	return e, nil
}
