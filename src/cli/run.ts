// SPDX-License-Identifier: AGPL-3.0-or-later
/** The command line. */
import * as NodeChildProcessSpawner from "@effect/platform-node/NodeChildProcessSpawner"
import * as NodeFileSystem from "@effect/platform-node/NodeFileSystem"
import * as NodePath from "@effect/platform-node/NodePath"
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import * as NodeStdio from "@effect/platform-node/NodeStdio"
import * as NodeTerminal from "@effect/platform-node/NodeTerminal"
import * as Data from "effect/Data"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Command from "effect/cli/Command"
import { bench } from "./bench.ts"
import { config } from "./config.ts"
import { db } from "./db.ts"
import { teardown } from "./exit.ts"
import { version } from "./options.ts"
import { queue } from "./queue.ts"
import { send } from "./send.ts"
import { serve } from "./serve.ts"
import * as Main from "../../layers/Main.ts"

class NotByHand extends Data.TaggedError("UsageError")<{}> {
  override readonly message = "workers are started by 'pepsi serve'; there is no other use of them"
}

/** Here for its line in the help: `main.ts` starts the true ones, without a command line. */
const worker = Command.make("worker", {}, () => Effect.fail(new NotByHand())).pipe(
  Command.withDescription("A process that runs stages; 'serve' starts these itself")
)

const pepsi = Command.make("pepsi").pipe(
  Command.withDescription(
    "A privacy-minded mail server: SMTP in, a pipeline of stages on PostgreSQL, Maildirs out"
  ),
  Command.withSubcommands([serve, worker, config, db, queue, send, bench])
)

const platform = NodeChildProcessSpawner.layer.pipe(
  Layer.provideMerge(
    Layer.mergeAll(NodeFileSystem.layer, NodePath.layer, NodeStdio.layer, NodeTerminal.layer)
  )
)

/** Runs the command that the arguments name. */
export const runCommandLine = (): void =>
  NodeRuntime.runMain(
    Command.run(pepsi, { version }).pipe(Effect.provide(Layer.mergeAll(platform, Main.earlyLog))),
    { teardown, disableErrorReporting: true }
  )
