// SPDX-License-Identifier: AGPL-3.0-or-later
/** The queue's contract, in memory and in PostgreSQL. */
import * as Layer from "effect/Layer"
import { QueuePg } from "../../layers/QueuePg.ts"
import * as Database from "../support/Database.ts"
import * as MemoryQueue from "../support/MemoryQueue.ts"
import { TablePg } from "../support/TablePg.ts"
import { contract } from "./Queue.ts"

contract("memory", () => MemoryQueue.layer)
contract("PostgreSQL", () => Layer.merge(QueuePg, TablePg).pipe(Layer.provide(Database.fresh())))
