// SPDX-License-Identifier: AGPL-3.0-or-later
/**
 * The entry of the program: checks that it runs on a Node it was made for, then hands over to the
 * worker or to the command line. Nothing is imported before that check has passed.
 */
const [major = 0] = process.versions.node.split(".").map(Number)
/** The oldest Node that runs us; npm installs the one we are tested with. */
const leastMajor = 24

if (major < leastMajor) {
  process.stderr.write(
    `pepsi needs Node ${leastMajor} or newer, this is ${process.version}. ` +
      "Run 'npm ci' (without --ignore-scripts): it brings the right one, and 'npm start' uses it.\n"
  )
  process.exit(78) // EX_CONFIG
} else if (process.argv[2] === "worker" && process.argv[3] === "--orders") {
  // Started by a daemon: as little as possible is loaded.
  const { runWorker } = await import("./cli/worker.ts")
  runWorker(process.argv[4] ?? "")
} else {
  const { runCommandLine } = await import("./cli/run.ts")
  runCommandLine()
}
